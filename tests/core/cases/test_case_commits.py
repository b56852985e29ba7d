"""Commits of cases whose answer is lost, or that the database refuses; and how often an execution waits for it."""

import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from bench.relay import CountingRelay
from durable_core import DefinitionError, EffectEscaped, StepTransactionOwned, UnsupportedTransaction
from durable_core.cases.cases import Cases
from durable_core.cases.clock import VirtualClock
from durable_core.cases.declare import Attempts, CaseType
from durable_core.cases.memory import MemoryStore
from durable_core.cases.postgres import _statements
from durable_core.database.commits import CommitUnknown
from durable_core.database.connections import Database
from durable_core.database.transactions import run
from durable_core.refusals import CaseClaimLost, ExecutionFailed
from durable_core.testing import wait_until_blocked, wait_until_somebody_blocks
from tests.relay import COMMIT, Cut


@pytest.fixture
def kind():
    return CaseType("test.commits", registered=False)


@pytest.fixture
def here(engine, kind):
    """The same cases, not through the relay."""
    return Cases(engine, [kind])


@pytest.fixture
def case_id(engine, here):
    with engine.begin() as tx:
        return here.create(tx, "test.commits", {"n": 0}).id


def note(session, text_="written"):
    session.execute(text("insert into effects (note) values (:note)"), {"note": text_})


def effects(engine):
    with engine.begin() as tx:
        return tx.scalars(text("select note from effects order by id")).all()


def told(engine, here, case_id):
    with engine.begin() as tx:
        assert here.verify(tx, case_id).ok
        case = here.get(tx, case_id)
        return [(str(e.entry), e.attempt) for e in here.journal(tx, case_id)], case.seq, case.claim


ONE_COMMIT = ([("claimed", 1), ("completed", 1)], 1, None)


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_a_commit_whose_answer_was_lost_is_asked_of_the_case_and_the_handler_runs_once(
    far, relay, kind, engine, here, case_id, arrives, writes
):
    runs, cuts = [], []

    @kind.step("go")
    def go(state, ctx):
        runs.append(ctx.execution_id)
        if writes:
            ctx.in_commit(note)
        cuts.append(relay.cut_after(COMMIT) if arrives else relay.cut_before(COMMIT))
        return {"n": 1}

    done = Cases(far, [kind]).execute(case_id, "go")
    assert cuts[0].done
    assert runs == [done.execution_id]
    assert (done.seq, done.attempts, done.state) == (1, 1, {"n": 1})
    assert told(engine, here, case_id) == ONE_COMMIT
    assert effects(engine) == (["written"] if writes else [])


@pytest.mark.parametrize("arrives", [True, False])
def test_a_claim_whose_answer_was_lost_is_claimed_once(far, relay, kind, engine, here, case_id, arrives):
    runs = []
    kind.step("go")(lambda state, ctx: runs.append(1) or state)
    cases = Cases(far, [kind])
    with far.engine.connect() as warm:
        warm.execute(text("select 1"))
    cut = relay.cut_after(COMMIT) if arrives else relay.cut_before(COMMIT)
    cases.execute(case_id, "go")
    assert cut.done
    assert runs == [1]
    assert told(engine, here, case_id) == ONE_COMMIT


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_failure_whose_answer_was_lost_is_journalled_once(far, relay, kind, engine, here, case_id, arrives, last):
    cuts = []

    @kind.step("go", retry=Attempts(2, 0))
    def go(state, ctx):
        if ctx.attempt == (2 if last else 1):
            cuts.append(relay.cut_after(COMMIT) if arrives else relay.cut_before(COMMIT))
        raise ValueError

    with pytest.raises(ExecutionFailed):
        Cases(far, [kind]).execute(case_id, "go")
    assert cuts[0].done
    assert told(engine, here, case_id) == ([("claimed", 1), ("attempt-failed", 1), ("failed", 2)], 0, None)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_that_nobody_can_ask_about_is_said_to_be_unknown_and_not_to_have_failed(
    relay, kind, engine, here, case_id, arrives
):
    # Without trying TLS first, so that each later cut is a whole call.
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port), connect_args={"sslmode": "disable"})
    runs: list[int] = []

    @kind.step("go", retry=Attempts(3, 0))
    def go(state, ctx):
        runs.append(1)
        ctx.in_commit(note)
        cut = relay.cut_after(COMMIT) if arrives else relay.cut_before(COMMIT)
        for _ in range(10):
            cut.then = Cut(b"user\x00", arrives=False)
            cut = cut.then
        return {"n": 1}

    with pytest.raises(CommitUnknown):
        Cases(far, [kind]).execute(case_id, "go")
    far.dispose()
    assert runs == [1]
    entries, seq, claim = told(engine, here, case_id)
    assert (entries, seq) == (ONE_COMMIT[:2] if arrives else ([("claimed", 1)], 0))
    assert (claim is None) == arrives


WAITS_AT_COMMIT = """
    create function wait_at_commit() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock(7); return null; end $$;
    create constraint trigger wait_at_commit after insert on effects deferrable initially deferred
        for each row execute function wait_at_commit();
"""


def test_an_unknown_commit_waits_for_the_transaction_in_doubt(far, relay, kind, engine, other_engine, here, case_id):
    """Its backend commits still: whoever read without the lock would find nothing, and run the step again."""
    runs = []

    @kind.step("go")
    def go(state, ctx):
        runs.append(1)
        ctx.in_commit(note)
        return {"n": 1}

    with engine.begin() as tx:
        tx.exec_driver_sql(WAITS_AT_COMMIT)
    try:
        with other_engine.connect() as holder, ThreadPoolExecutor(1) as pool:
            holder.execute(text("select pg_advisory_xact_lock(7)"))
            running = pool.submit(Cases(far, [kind]).execute, case_id, "go")
            committing = wait_until_somebody_blocks(engine)
            relay.lose_all()
            asking = _another_that_blocks(engine, committing)
            wait_until_blocked(engine, asking, by=committing)
            holder.commit()
            done = running.result(30)
    finally:
        with engine.begin() as tx:
            tx.exec_driver_sql("drop function wait_at_commit cascade")
    assert (runs, done.seq) == ([1], 1)
    assert told(engine, here, case_id) == ONE_COMMIT
    assert effects(engine) == ["written"]


CLAIM_WAITS_AT_COMMIT = """
    create function wait_at_commit() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock(7); return null; end $$;
    create constraint trigger wait_at_commit after insert on durable.case_claims deferrable initially deferred
        for each row execute function wait_at_commit();
"""


def test_an_unknown_claim_waits_for_the_transaction_in_doubt(far, relay, kind, engine, other_engine, here, case_id):
    """Who looked without the lock would find no claim, claim again, and be told that it is busy with itself."""
    kind.step("go")(lambda state, ctx: {"n": 1})
    with engine.begin() as tx:
        tx.exec_driver_sql(CLAIM_WAITS_AT_COMMIT)
    try:
        with other_engine.connect() as holder, ThreadPoolExecutor(1) as pool:
            holder.execute(text("select pg_advisory_xact_lock(7)"))
            running = pool.submit(Cases(far, [kind]).execute, case_id, "go")
            committing = wait_until_somebody_blocks(engine)
            relay.lose_all()
            wait_until_blocked(engine, _another_that_blocks(engine, committing), by=committing)
            holder.commit()
            done = running.result(30)
    finally:
        with engine.begin() as tx:
            tx.exec_driver_sql("drop function wait_at_commit cascade")
    assert done.seq == 1
    assert told(engine, here, case_id) == ONE_COMMIT


def _another_that_blocks(engine, but):
    waiting = text(
        "select pid from pg_stat_activity where datname = current_database() and pid <> :but"
        " and cardinality(pg_blocking_pids(pid)) > 0"
    )
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with engine.connect() as tx:
            if (pid := tx.scalar(waiting, {"but": but})) is not None:
                return pid
    raise TimeoutError("nobody waits for the transaction in doubt")


def test_a_claim_that_is_lost_while_its_commit_is_in_doubt_is_told_as_lost(
    far, relay, kind, engine, here, case_id, clock
):
    """The COMMIT never arrived, and before it can be asked about somebody takes the case over."""

    @kind.step("go", retry=Attempts(1))
    def go(state, ctx):
        if ctx.actor == "other":
            return {"n": 2}
        cut = relay.cut_before(COMMIT)
        cut.then = Cut(b"lock_timeout", arrives=True)
        lifecycle, asked = cases.lifecycle, cases.lifecycle._asked

        def overtaken(*of):
            clock.advance(31)
            here.execute(case_id, "go", actor="other")
            return asked(*of)

        lifecycle._asked = overtaken
        return {"n": 1}

    cases = Cases(far, [kind])
    with pytest.raises(CaseClaimLost):
        cases.execute(case_id, "go")
    entries, seq, claim = told(engine, here, case_id)
    assert [kind for kind, _ in entries] == ["claimed", "expired", "claimed", "completed", "failed"]
    assert (seq, claim) == (1, None)


def test_a_deadlock_in_a_write_costs_no_attempt(engine, kind, here, case_id):
    tries = []

    def deadlocked(session):
        tries.append(1)
        note(session)
        if len(tries) < 3:
            session.execute(text("do $$ begin raise exception 'deadlock' using errcode = '40P01'; end $$"))

    @kind.step("go")
    def go(state, ctx):
        ctx.in_commit(deadlocked)
        return {"n": ctx.attempt}

    done = here.execute(case_id, "go")
    assert (len(tries), done.attempts) == (3, 1)
    assert told(engine, here, case_id) == ONE_COMMIT
    assert effects(engine) == ["written"]


def test_a_commit_that_is_refused_every_time_is_a_failed_attempt(engine, kind, here, case_id):
    def deadlocked(session):
        session.execute(text("do $$ begin raise exception 'deadlock' using errcode = '40P01'; end $$"))

    @kind.step("go", retry=Attempts(2, 0))
    def go(state, ctx):
        if ctx.attempt == 1:
            ctx.in_commit(deadlocked)
        return {"n": ctx.attempt}

    assert here.execute(case_id, "go").attempts == 2
    assert told(engine, here, case_id)[0] == [("claimed", 1), ("attempt-failed", 1), ("completed", 2)]


def test_a_constraint_of_the_hosts_that_is_checked_at_commit_is_a_failed_attempt(engine, kind, here, case_id):
    with engine.begin() as tx:
        tx.execute(text("create table late (n int unique deferrable initially deferred)"))

    @kind.step("go", retry=Attempts(2, 0))
    def go(state, ctx):
        for _ in range(3 - ctx.attempt):
            ctx.in_commit(lambda session: session.execute(text("insert into late values (1)")))
        return {"n": ctx.attempt}

    try:
        assert here.execute(case_id, "go").attempts == 2
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop table late"))
    assert told(engine, here, case_id)[0] == [("claimed", 1), ("attempt-failed", 1), ("completed", 2)]


def test_a_journal_that_cannot_be_written_surfaces_and_leaves_the_claim_to_its_lease(engine, kind, here, case_id):
    with engine.begin() as tx:
        tx.execute(
            text("alter table durable.case_journal add constraint never check (entry <> 'attempt-failed') not valid")
        )
    kind.step("go", retry=Attempts(2, 0))(lambda state, ctx: 1 / 0)
    try:
        with pytest.raises(Exception, match="never"):
            here.execute(case_id, "go")
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.case_journal drop constraint never"))
    entries, seq, claim = told(engine, here, case_id)
    assert (entries, seq, claim.attempt) == ([("claimed", 1)], 0, 1)


def test_the_session_of_a_write_is_the_hosts_own_and_cannot_be_ended(engine, kind, case_id):
    class HostSession(Session):
        pass

    seen = []

    def ends(session):
        seen.append((isinstance(session, HostSession), session.info))
        note(session)
        for end in (session.commit, session.rollback, session.close):
            with pytest.raises(StepTransactionOwned):
                end()

    kind.step("go")(lambda state, ctx: ctx.in_commit(ends) or {"n": 1})
    cases = Cases(sessionmaker(engine, class_=HostSession, info={"of": "host"}), [kind])
    assert cases.execute(case_id, "go").seq == 1
    assert seen == [(True, {"of": "host"})]
    assert effects(engine) == ["written"]


ENDS = {
    "commit": lambda session: session.connection().connection.dbapi_connection.execute("commit"),
    "commit of the driver": lambda session: session.connection().connection.dbapi_connection.commit(),
    "commit of the connection": lambda session: session.connection().commit(),
    "commit as SQL": lambda session: session.execute(text("commit")),
    "rollback": lambda session: session.connection().connection.dbapi_connection.execute("rollback"),
}


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_write_that_ends_the_transaction_behind_our_back_is_found_and_nothing_stands(
    engine, kind, here, case_id, end, swallowed
):
    def escapes(session):
        note(session)
        try:
            ENDS[end](session)
        except (DBAPIError, psycopg.Error):
            if not swallowed:
                raise

    kind.step("go", retry=Attempts(3, 0))(lambda state, ctx: ctx.in_commit(escapes) or {"n": 1})
    with pytest.raises(ExecutionFailed) as failed:
        here.execute(case_id, "go")
    assert isinstance(failed.value.cause, EffectEscaped)
    assert "so nothing of the case changed" in str(failed.value.cause)
    assert failed.value.attempts == 1
    assert told(engine, here, case_id) == ([("claimed", 1), ("failed", 1)], 0, None)
    assert effects(engine) == []


def test_a_write_waits_for_locks_as_its_host_decided(engine, kind, here, case_id):
    seen = []
    kind.step("go")(
        lambda state, ctx: ctx.in_commit(lambda s: seen.append(s.scalar(text("show lock_timeout")))) or state
    )
    here.execute(case_id, "go")
    assert seen == ["0"]


# --- what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [0, 1])
def test_an_execution_is_two_transactions_and_ten_round_trips(engine, kind, case_id, writes):
    relay = CountingRelay(engine.url.host, engine.url.port)
    through = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))

    @kind.step("go")
    def go(state, ctx):
        for _ in range(writes):
            ctx.in_commit(note)
        return {**state, "n": state["n"] + 1}

    cases = Cases(through, [kind])
    with engine.begin() as tx:
        big = cases.create(tx, kind, {"n": 0, "text": "x" * 10_000}).id
    try:
        for _ in range(10):  # until all is prepared
            cases.execute(big, "go")
        relay.trips = []
        cases.execute(big, "go")
        sent = [message for trip in relay.trips for message in trip]
        assert len(relay.trips) <= 10 + 3 * writes, relay.trips
        assert sent.count("COMMIT") == 2, sent
    finally:
        through.dispose()
        relay.close()


# --- where cases are kept --------------------------------------------------------------------------


def test_cases_are_kept_where_an_engine_a_sessionmaker_or_a_database_says(engine, kind, case_id):
    kind.step("go")(lambda state, ctx: state)
    for where in (engine, sessionmaker(engine), Database(engine)):
        assert Cases(where, [kind]).execute(case_id, "go").seq > 0
    for wrong in (create_engine("sqlite://"), sessionmaker()):
        with pytest.raises(DefinitionError):
            Cases(wrong, [kind])
    for wrong in ([kind, kind], ["sale"]):
        with pytest.raises(DefinitionError):
            Cases(engine, wrong)
    for wrong in ({"lease": 15, "heartbeat": 5}, {"lease": -1}, {"heartbeat": "5"}):
        with pytest.raises(DefinitionError):
            Cases(engine, [kind], **wrong)


def test_a_transaction_of_another_place_is_refused(engine, kind, here):
    memory = MemoryStore()
    in_memory = Cases(memory, [kind])
    with memory.transaction() as tx:
        with pytest.raises(UnsupportedTransaction):
            here.create(tx, kind, {})
        case_id = in_memory.create(tx, kind, {}).id
    with engine.begin() as other, pytest.raises(UnsupportedTransaction):
        in_memory.get(other, case_id)
    with pytest.raises(UnsupportedTransaction):
        in_memory.get(tx, case_id)
    with memory.transaction(), pytest.raises(RuntimeError, match="open in this thread"):
        in_memory.execute(case_id, "go")


def test_a_beat_in_memory_comes_also_while_a_transaction_of_its_thread_is_open(kind):
    clock = VirtualClock()
    memory = MemoryStore(clock)
    cases, seen = Cases(memory, [kind]), []

    def go(state, ctx):
        with memory.transaction() as tx:
            clock.advance(40)
            seen.append(cases.get(tx, ctx.case_id).claim.expires_at > clock.now())
        return state

    kind.step("go")(go)
    with memory.transaction() as tx:
        case_id = cases.create(tx, kind, {}).id
    assert cases.execute(case_id, "go").seq == 1
    assert seen == [True]


def test_what_a_transaction_in_memory_wrote_is_gone_when_it_is_rolled_back(kind):
    memory = MemoryStore()
    cases = Cases(memory, [kind])

    def breaks_off(tx):
        cases.create(tx, kind, {})
        tx.add("notes", 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), memory.transaction() as tx:
        breaks_off(tx)
    with memory.transaction() as tx:
        assert (memory.cases, tx.rows("notes")) == ({}, ())


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_our_transactions_read_what_is_committed_whatever_the_host_has_by_default(engine, kind, case_id, level):
    """A claim that waited for the lock has to see who took the case meanwhile."""
    host = create_engine(engine.url, isolation_level=level)
    seen = []

    def look(session):
        seen.append(session.scalar(text("show transaction_isolation")))
        seen.append(session.scalar(text("select pg_current_xact_id_if_assigned() is not null")))

    kind.step("go")(lambda state, ctx: ctx.in_commit(look) or state)
    try:
        assert Cases(host, [kind]).execute(case_id, "go").seq == 1
    finally:
        host.dispose()
    assert seen == ["read committed", True]


def test_a_heartbeat_writes_no_index(engine, kind, case_id):
    """Beats are HOT: nothing that a heartbeat writes is indexed, and the page keeps room for them."""
    seen = []

    def counted(tx):
        tx.execute(text("select pg_stat_force_next_flush()"))
        tx.commit()
        found = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'case_claims'"
        return tuple(tx.execute(text(found)).one())

    @kind.step("go")
    def go(state, ctx):
        with engine.connect() as tx:
            before = counted(tx)
            for _ in range(100):
                told = {"case_id": case_id, "execution_id": ctx.execution_id, "lease_seconds": 30.0}
                assert run(tx, _statements.keep, **told)[0]["still_mine"]
                tx.commit()
            seen.extend(after - then for after, then in zip(counted(tx), before, strict=True))
        return state

    Cases(engine, [kind]).execute(case_id, "go")
    updated, hot = seen
    assert updated >= 100
    assert hot >= 0.95 * updated
