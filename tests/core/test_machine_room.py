"""
The database refuses a statement for reasons of its own, at each statement of ours: nothing is spent, nothing is half.

The refusals are raised by triggers with the SQLSTATE that Postgres itself would use. Opening the step's transaction
is a `select … for no key update`, the first statement in it: it meets time-outs, tried here with real ones, and cannot
be a deadlock's or a serialization's victim.
"""

import threading
import time

import pytest
from sqlalchemy import create_engine, text

from durable_core import Retry
from durable_core.claims.claim import Holder
from durable_core.claims.heartbeat import Heartbeat
from durable_core.database.connections import Database
from durable_core.database.transactions import DATABASE_ERRORS
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, _statements, perform
from durable_core.sweeps import Bounds, named, run_sweep
from tests.conftest import effects_of, record

ROLLED_BACK = ["40001", "40P01"]
REFUSALS = [
    *ROLLED_BACK,
    "53100",  # disk full
    "53300",  # too many clients
    "25006",  # read-only: just demoted, or still in recovery
    "55P03",  # lock_timeout
    "57014",  # statement_timeout
    "25P04",  # transaction_timeout, from PostgreSQL 17
]
ALWAYS = 1000
BOUNDS = Bounds(lease_seconds=30.0, heartbeat_seconds=8.0)

CLAIM = "old.state = 'pending' and new.state = 'processing'"
SETTLE = "new.state = 'sent'"
RELEASE = "new.settled_fence > old.settled_fence and new.state <> 'sent'"
KEEP = "new.beat_at > old.beat_at"
MARK = "new.state = 'pending' and old.state = 'pending' and new.hint_at > old.hint_at"
TAKE_BACK = "old.state = 'processing' and new.state = 'pending' and new.settled_fence = old.settled_fence"

REFUSE = """
create sequence public.refused;
create function public.refuse() returns trigger language plpgsql as $$
begin
    -- A sequence keeps its number when the transaction is rolled back.
    if nextval('public.refused') <= tg_argv[1]::integer then
        raise exception 'refused by the test' using errcode = tg_argv[0];
    end if;
    return new;
end $$
"""


@pytest.fixture
def refuse(engine):
    """The first `times` updates of a delivery that do this are refused: `refuse("40001", SETTLE)`."""
    with engine.begin() as tx:
        tx.execute(text(REFUSE))

    def _refuse(code, doing, times=1, at_commit=False):
        when = "after" if at_commit else "before"
        with engine.begin() as tx:
            tx.execute(
                text(
                    f"create {'constraint ' * at_commit}trigger zz_refuse {when} update on durable.deliveries"
                    f" {'deferrable initially deferred ' * at_commit}for each row when ({doing})"
                    f" execute function public.refuse('{code}', '{times}')"
                )
            )

    yield _refuse
    with engine.begin() as tx:
        tx.execute(text("drop function public.refuse() cascade"))
        tx.execute(text("drop sequence public.refused"))


def refusals(engine):
    with engine.connect() as tx:
        return tx.scalar(text("select last_value from public.refused where is_called"))


def with_session(step, runs):
    runs.append(step.attempt)
    record(step.session, step)


def in_commit(step, runs):
    runs.append(step.attempt)
    step.in_commit(lambda session: record(session, step))


def without(step, runs):
    runs.append(step.attempt)


# --- the claim ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_claim_leaves_the_row_as_it_was_for_the_next_hint(worker, kind, make, row, lines, refuse, code):
    made = make()
    before = row(made.id)
    refuse(code, CLAIM)
    assert perform(worker, kind, made.id).outcome is Outcome.UNAVAILABLE
    assert row(made.id) == before
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert (row(made.id).attempts, row(made.id).fence, lines(made.id)) == (1, 1, [])


# --- the commit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("does", [with_session, in_commit, without])
@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_receipt_is_written_again_and_spends_nothing(
    worker, declare, make, row, lines, engine, refuse, code, does
):
    runs = []
    kind = declare(lambda step: does(step, runs))
    made = make(kind)
    refuse(code, SETTLE, times=2)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert refusals(engine) == 3
    # What was done with the session went with its transaction, so only the whole attempt can be repeated.
    assert runs == ([1, 1, 1] if does is with_session else [1])
    assert effects_of(engine, made.id) == ([] if does is without else [(1, "")])
    assert (row(made.id).attempts, row(made.id).failures, row(made.id).interruptions, lines(made.id)) == (1, 0, 0, [])


@pytest.mark.parametrize("does", [with_session, in_commit, without])
@pytest.mark.parametrize("code", ROLLED_BACK)
def test_a_refused_commit_is_made_again_and_spends_nothing(
    worker, declare, make, row, lines, engine, refuse, code, does
):
    runs = []
    kind = declare(lambda step: does(step, runs))
    made = make(kind)
    refuse(code, SETTLE, at_commit=True)
    assert perform(worker, kind, made.id).outcome is Outcome.SENT
    assert runs == ([1, 1] if does is with_session else [1])
    assert effects_of(engine, made.id) == ([] if does is without else [(1, "")])
    assert (row(made.id).attempts, row(made.id).failures, row(made.id).interruptions, lines(made.id)) == (1, 0, 0, [])


@pytest.mark.parametrize("does", [with_session, in_commit, without])
def test_a_commit_refused_for_good_is_given_up_after_three_times_without_a_failure(
    worker, declare, make, row, lines, engine, refuse, does
):
    runs = []
    kind = declare(lambda step: does(step, runs))
    made = make(kind)
    refuse("40P01", SETTLE, times=ALWAYS)
    assert perform(worker, kind, made.id).outcome is Outcome.INTERRUPTED
    assert refusals(engine) == 3
    assert effects_of(engine, made.id) == []
    assert (row(made.id).state, row(made.id).failures, row(made.id).interruptions) == ("pending", 0, 1)
    assert [(line.move, line.reason) for line in lines(made.id)] == [("release", "INFRASTRUCTURE")]


# --- the report --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_report_of_a_failure_is_made_again_and_counts_once(
    worker, declare, make, row, lines, engine, refuse, code
):
    def handler(step):
        record(step.session, step)
        raise Retry("busy")

    kind = declare(handler)
    made = make(kind)
    refuse(code, RELEASE, times=2)
    assert perform(worker, kind, made.id).outcome is Outcome.RETRY
    assert (row(made.id).failures, row(made.id).interruptions, row(made.id).error_code) == (1, 0, "RETRY_ASKED")
    assert [line.move for line in lines(made.id)] == ["fail"]
    assert effects_of(engine, made.id) == []


# --- heartbeat and sweeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ROLLED_BACK)
def test_a_refused_heartbeat_loses_no_claim(database, make, row, refuse, code):
    made = make(state="processing")
    heartbeat = Heartbeat(database, Holder())
    held = heartbeat.hold(made.held, _statements)
    refuse(code, KEEP)
    with pytest.raises(DATABASE_ERRORS):
        heartbeat.beat()
    before = row(made.id).lease_expires_at
    heartbeat.beat()
    heartbeat.stop()
    assert row(made.id).lease_expires_at > before
    assert not held.lost.is_set()


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_reap_takes_everything_back_the_next_time_and_holds_nothing(database, make, row, clock, refuse, code):
    lost = [make(state="processing").id for _ in range(3)]
    clock.advance(31)
    refuse(code, TAKE_BACK)
    with pytest.raises(DATABASE_ERRORS):
        sweep.reap(database)
    assert [row(id).state for id in lost] == ["processing"] * 3
    assert sweep.reap(database) == 3
    assert [(row(id).interruptions, row(id).held_reason) for id in lost] == [(1, None)] * 3


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_dispatch_publishes_everything_the_next_time(database, make, carrier, refuse, code):
    waiting = {make().id for _ in range(3)}
    refuse(code, MARK)
    with pytest.raises(DATABASE_ERRORS):
        sweep.dispatch(database)
    assert carrier.published == []
    assert sweep.dispatch(database) == 3
    assert {hint.id for hint in carrier.published} == waiting


# --- a real deadlock -----------------------------------------------------------------------------------


def test_two_attempts_that_deadlock_in_their_hosts_own_rows_both_end_sent(
    make_worker, other_engine, declare, make, row, engine
):
    with engine.begin() as tx:
        first, second = (tx.scalar(text("insert into effects (note) values ('stock') returning id")) for _ in range(2))
    both, runs = threading.Barrier(2), []

    def handler(step, n):
        runs.append(n)
        for place, id in enumerate((first, second) if n == 1 else (second, first)):
            step.session.execute(text("update effects set note = note where id = :id"), {"id": id})
            if place == 0 and len(runs) <= 2:
                both.wait(20)
        record(step.session, step)

    kind = declare(handler)
    rows = {n: make(kind, {"n": n}).id for n in (1, 2)}
    outcomes = {}

    def work(n):
        outcomes[n] = perform(make_worker(on=Database(other_engine)), kind, rows[n]).outcome

    threads = [threading.Thread(target=work, args=(n,)) for n in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == {1: Outcome.SENT, 2: Outcome.SENT}
    assert len(runs) == 3
    for id in rows.values():
        assert (row(id).attempts, row(id).failures, row(id).interruptions) == (1, 0, 0)
        assert effects_of(engine, id) == [(1, "")]


# --- time-outs of the host -----------------------------------------------------------------------------


@pytest.fixture
def bounded(engine):
    """The same database as the host's role sees it, with time-outs of its own: `bounded(statement_timeout=100)`."""
    made = []

    def _bounded(**settings):
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        made.append(create_engine(engine.url, connect_args={"options": options}))
        return Database(made[-1])

    yield _bounded
    for one in made:
        one.dispose()


def test_a_statement_of_ours_that_the_hosts_time_out_ends_leaves_the_row_to_its_lease_and_books_no_failure(
    make_worker, bounded, other_engine, declare, make, row, engine, database, clock, worker
):
    """Somebody holds the row for longer than the host lets a statement wait: neither commit nor report gets through."""
    runs, others = [], []

    def handler(step):
        runs.append(step.attempt)
        step.in_commit(lambda session: record(session, step))
        if len(runs) == 1:
            others.append(other_engine.connect())
            others[0].execute(text("select from durable.deliveries where id = :id for update"), {"id": step.id})

    kind = declare(handler)
    made = make(kind)
    hasty = make_worker(on=bounded(statement_timeout=100))
    assert perform(hasty, kind, made.id).outcome is Outcome.UNKNOWN
    others[0].close()
    assert (row(made.id).state, row(made.id).settled_fence, effects_of(engine, made.id)) == ("processing", 0, [])
    clock.advance(31)
    assert sweep.reap(database) == 1
    assert perform(hasty, kind, made.id).outcome is Outcome.SENT
    assert runs == [1, 1]
    assert (row(made.id).failures, row(made.id).interruptions) == (0, 1)
    assert effects_of(engine, made.id) == [(2, "")]


@pytest.mark.parametrize(
    ("setting", "code"), [("lock_timeout", "LockNotAvailable"), ("statement_timeout", "QueryCanceled")]
)
def test_a_time_out_of_the_host_inside_the_session_is_a_failure_without_half_an_effect(
    make_worker, bounded, other_engine, declare, make, row, engine, setting, code
):
    def handler(step):
        record(step.session, step, "half")
        with other_engine.connect() as other:
            other.execute(text("select pg_advisory_xact_lock(4711)"))
            step.session.execute(text("select pg_advisory_xact_lock(4711)"))

    kind = declare(handler)
    made = make(kind)
    done = perform(make_worker(on=bounded(**{setting: 100})), kind, made.id)
    assert done.outcome is Outcome.RETRY
    assert code in str(row(made.id).error_message)
    assert (row(made.id).failures, row(made.id).interruptions, effects_of(engine, made.id)) == (1, 0, [])


def test_a_session_that_its_host_ended_for_idleness_repeats_the_attempt_and_leaves_no_half_effect(
    make_worker, bounded, declare, make, row, engine
):
    runs = []

    def handler(step):
        runs.append(step.attempt)
        record(step.session, step)
        if len(runs) == 1:
            time.sleep(0.5)
            record(step.session, step, "after the pause")

    kind = declare(handler)
    made = make(kind)
    hasty = make_worker(on=bounded(idle_in_transaction_session_timeout=100))
    assert perform(hasty, kind, made.id).outcome is Outcome.SENT
    assert runs == [1, 1]
    assert (row(made.id).attempts, row(made.id).failures, effects_of(engine, made.id)) == (1, 0, [(1, "")])


@pytest.mark.field("R53")
def test_a_connection_that_the_session_cannot_get_repeats_the_attempt_and_fails_nothing(
    make_worker, engine, relay, declare, make, row
):
    """A server without room, or one that is gone, ends the call without any SQLSTATE."""
    url = engine.url.set(host="127.0.0.1", port=relay.port)
    # Without trying TLS first, so that the one cut is all that the call meets.
    far = create_engine(url, connect_args={"sslmode": "disable"})
    runs, refused = [], []

    def handler(step):
        runs.append(step.attempt)
        if len(runs) == 1:
            far.dispose()
            refused.append(relay.cut_before(b"user\x00"))
        record(step.session, step)

    kind = declare(handler, max_attempts=1)
    made = make(kind)
    assert perform(make_worker(on=Database(far)), kind, made.id).outcome is Outcome.SENT
    assert refused[0].done
    assert runs == [1, 1]
    assert (row(made.id).attempts, row(made.id).failures, effects_of(engine, made.id)) == (1, 0, [(1, "")])
    far.dispose()


# --- a server that came back ---------------------------------------------------------------------------


@pytest.fixture
def soon_after_a_start(engine, clock):
    """The clock 5 s after the server's start, and a reap that began before it and never ended."""
    with engine.begin() as tx:
        up = tx.scalar(text("select extract(epoch from clock_timestamp() - pg_postmaster_start_time())"))
        tx.execute(
            text(
                "insert into durable.loops (name, began_at) select 'reap', pg_postmaster_start_time() - interval '1 s'"
            )
        )
    clock.advance(5 - float(up))


def test_a_sweep_that_ended_with_its_server_is_not_waited_for(database, engine, soon_after_a_start, make, row):
    """And the first one takes nothing: every lease may be over although every worker lives."""
    made = make(state="processing")
    with engine.begin() as tx:
        tx.execute(text("update durable.deliveries set lease_expires_at = durable.durable_now()"))
    assert run_sweep(database, named("reap"), BOUNDS)["skipped"] == "after an outage owners may beat first"
    assert row(made.id).state == "processing"


def test_a_sweep_that_began_since_the_start_is_waited_for(database, engine, clock, soon_after_a_start):
    run_sweep(database, named("reap"), BOUNDS)
    with engine.begin() as tx:
        tx.execute(text("update durable.loops set ended_at = null"))
    clock.advance(5)
    assert run_sweep(database, named("reap"), BOUNDS)["skipped"] == "one just ran"


def test_a_sweep_whose_end_cannot_be_noted_either_raises_what_ended_it(database, engine, make, carrier):
    """The connection goes, and with it the server's answer to the note: the first error is the one that is told."""
    make()

    def cut_everything(*_):
        with engine.begin() as tx:
            tx.execute(text("alter table durable.loops rename to lost"))
        raise ConnectionError("the first error")

    carrier.depths = cut_everything
    try:
        with pytest.raises(ConnectionError, match="the first error"):
            run_sweep(database, named("dispatch"), BOUNDS)
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.lost rename to loops"))
