"""Plans on every transaction that deliveries take, sync and async; and what the database itself refuses."""

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import IllegalMove, PlanRefused, StalePlan, UnsupportedTransaction, plans, wake
from durable_core.database.guards import PLAN
from durable_core.deliveries.worker import Outcome
from tests.core.callers import CALLERS, caller
from tests.core.plan_shop import note


def api(how, name):
    """The function, or its async form, run in the caller's transaction."""
    asynchronous = how._runner is not None
    function = getattr(plans, f"a{name}" if asynchronous else name)
    return lambda *args, **kwargs: how._run(function(how.tx, *args, **kwargs))


@pytest.mark.parametrize("level", [None, "AUTOCOMMIT", "REPEATABLE READ"])
@pytest.mark.parametrize("name", CALLERS)
def test_a_plan_is_proposed_approved_read_and_compensated_in_any_transaction(shop, engine, worker, name, level):
    kind = shop.step()
    kind.compensation(lambda arguments, output: kind.planned(output + 1))
    with caller(engine, name, level) as how:
        plan = api(how, "propose")([kind.planned(1)], by="assistant", origin="o")
        with pytest.raises(PlanRefused):
            api(how, "propose")([], by="assistant")
        with pytest.raises(StalePlan):
            api(how, "approve")(plan.id, by="dana", digest="0" * 64)
        api(how, "approve")(plan.id, by="dana", digest=plan.digest, origin="o")
        assert api(how, "get")(plan.id).state == "approved"
        other = api(how, "propose")([kind.planned(2)], by="assistant", origin="o")
        assert api(how, "previous")(other.id, origin="o").id == plan.id
        assert [line.move for line in api(how, "journal")(plan.id, origin="o")] == ["propose", "approve"]
        with pytest.raises(IllegalMove):
            api(how, "release")(plan.id, by="dana", reason="mended", origin="o")
        api(how, "reject")(other.id, by="dana", reason="no")
        how.commit()
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    with caller(engine, name, level) as how:
        assert api(how, "report")(plan.id).state == "executed"
        made = api(how, "compensate")(plan.id, by="assistant")
        assert {listed.id for listed in api(how, "list")()} == {plan.id, other.id, made.plan.id}
        how.commit()
    assert shop.get(made.plan.id).steps[0].arguments == {"n": 2}
    assert shop.get(other.id).rejected_reason == "no"


@pytest.mark.parametrize("name", CALLERS)
def test_what_was_said_in_a_transaction_that_rolls_back_was_never_said(shop, engine, name):
    kind = shop.step()
    approved = shop.propose(kind.planned(1))
    with caller(engine, name) as how:
        plan = api(how, "propose")([kind.planned(1)], by="assistant")
        api(how, "approve")(approved.id, by="dana", digest=approved.digest)
        how.rollback()
    assert shop.raw(approved.id).state == "pending"
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.plans where id = :id"), {"id": plan.id}) == 0


@pytest.mark.parametrize("name", CALLERS)
def test_the_first_hint_follows_the_commit(shop, engine, carrier, name):
    kind = shop.step()
    plan = shop.propose(kind.planned(1))
    with caller(engine, name) as how:
        api(how, "approve")(plan.id, by="dana", digest=plan.digest)
        assert carrier.offered == []
        how.commit()
        if "Session" not in name and name != "scoped_session":
            wake() if how._runner is None else how._run(_awake())
    assert [hint.id for hint in carrier.offered] == [plan.id]


async def _awake():
    wake()


@pytest.mark.parametrize("name", ["propose", "approve", "get"])
@pytest.mark.parametrize("kind_of_caller", ["sync", "async"])
def test_what_is_no_transaction_is_refused(shop, engine, name, kind_of_caller):
    import asyncio

    calls = {
        "propose": (([shop.step().planned(1)],), {"by": "a"}),
        "approve": (("0198a4c4-0000-7000-8000-000000000000",), {"by": "a", "digest": "d"}),
        "get": (("0198a4c4-0000-7000-8000-000000000000",), {}),
    }
    args, kwargs = calls[name]
    sync, asynchronous = getattr(plans, name), getattr(plans, f"a{name}")
    call = sync if kind_of_caller == "sync" else lambda *args, **kwargs: asyncio.run(asynchronous(*args, **kwargs))
    with pytest.raises(UnsupportedTransaction):
        call(engine, *args, **kwargs)


# --- what the database refuses ---------------------------------------------------------------------


def refused(engine, sql, **parameters):
    with pytest.raises(DBAPIError) as error, engine.begin() as tx:
        tx.execute(text(sql), parameters)
    assert isinstance(error.value.orig, psycopg.Error)
    return f"{error.value.orig.sqlstate} {error.value.orig}"


def test_a_receipt_is_the_owners_alone_and_for_the_step_that_is_next(shop, engine, worker):
    plan = shop.approved(shop.step().planned(1), shop.step(note).planned(2))
    insert = (
        "insert into durable.plan_receipts (plan_id, step, kind, outcome, fence) values (:id, :step, 'k', 'ok', :fence)"
    )
    assert "55000" in refused(engine, insert, id=plan.id, step=0, fence=0), "nobody owns it"
    shop.claim(plan)
    for step, fence in ((1, 1), (0, 2), (0, 0), (-1, 1)):
        assert "55000" in refused(engine, insert, id=plan.id, step=step, fence=fence)
    other = shop.approved(shop.step().planned(1))
    shop.run(worker, other)
    for change in (
        "update durable.plan_receipts set outcome = 'failed', error_code = 'x' where plan_id = :id",
        "delete from durable.plan_receipts where plan_id = :id",
        "update durable.plans set error_code = 'x' where id = :id",
        "update durable.plans set state = 'approved', finished_at = null where id = :id",
    ):
        assert "55000" in refused(engine, change, id=other.id), change
    assert "55000" in refused(engine, insert, id=other.id, step=0, fence=1)
    assert "55000" in refused(engine, "truncate durable.plan_receipts")
    assert "55000" in refused(engine, "truncate durable.plans cascade")


def test_a_plan_in_use_stays_as_it_is_whoever_asks(shop, engine):
    plan = shop.propose(shop.step().planned(1), self_approval=False)
    changes = [
        "delete from durable.plans where id = :id",
        "update durable.plans set steps = '[1]' where id = :id",
        "update durable.plans set receipts = 1 where id = :id",
        "update durable.plans set fence = fence - 1 where id = :id",
        "update durable.plans set state = 'executing', fence = 1, continue_until = now() where id = :id",
        "update durable.plans set state = 'approved', approved_by = proposed_by, approved_at = now(),"
        " approved_digest = digest where id = :id",
        "update durable.plans set state = 'approved', approved_by = 'dana', approved_at = now(),"
        " approved_digest = 'another' where id = :id",
        "update durable.plans set state = 'rejected', finished_at = now() where id = :id",
        "update durable.plans set kind = 'another' where id = :id",
        "insert into durable.plans select (jsonb_populate_record(p, jsonb_build_object('id', gen_random_uuid(),"
        " 'approved_by', p.proposed_by))).* from durable.plans p where p.id = :id",
    ]
    for change in changes:
        assert refused(engine, change, id=plan.id)[:5] in ("55000", "23514"), change
    shop_claim = shop.approved(shop.step().planned(1), shop.step().planned(2))
    shop.claim(shop_claim)
    for change in (
        "update durable.plans set owner = 'psql' where id = :id",
        "update durable.plans set owner_pid = 1 where id = :id",
        "with failed as (insert into durable.plan_receipts (plan_id, step, kind, outcome, fence, error_code)"
        " values (:id, 0, 'k', 'failed', 1, 'x') returning plan_id)"
        " update durable.plans p set receipts = 1, settled_fence = 1, owner = null, lease_expires_at = null,"
        " deadline_at = null from failed f where p.id = f.plan_id",
        "update durable.plans set receipts = 1 where id = :id",
        "update durable.plans set approved_by = 'eve' where id = :id",
        "update durable.plans set state = 'executed', finished_at = now(), owner = null, lease_expires_at = null,"
        " deadline_at = null where id = :id",
        "delete from durable.journal where row_id = :id",
        "update durable.journal set by_whom = 'eve' where row_id = :id",
    ):
        assert refused(engine, change, id=shop_claim.id)[:5] in ("55000", "23514"), change


APPROVE = (
    "update durable.plans set state = 'approved', approved_by = 'dana', approved_digest = digest,"
    " approved_at = expires_at + make_interval(secs => :stamped) where id = :id"
)
START = (
    "update durable.plans set state = 'executing', fence = 1, owner = 'psql', lease_expires_at = expires_at,"
    " deadline_at = expires_at, continue_until = expires_at,"
    " claimed_at = expires_at + make_interval(secs => :stamped) where id = :id"
)


@pytest.mark.parametrize("change", [APPROVE, START], ids=["approve", "start"])
@pytest.mark.parametrize(
    ("after", "stamped", "passes"),
    [
        (-1, 0, True), (0, -1, True), (9.9, -1, True),
        (0, 0, False), (0, None, False), (9.9, 0, False), (10, -1, False), (3600, -3000, False),
    ],
)  # fmt: skip
def test_consent_that_is_over_is_no_consent_whoever_asks(shop, engine, clock, change, after, stamped, passes):
    """
    So many seconds after the expiry, under a stamp from so many seconds after it.

    A statement of ours that compared the clock just in time has stamped its instant, and is believed.
    """
    plan = shop.propose(shop.step().planned(1), expires=100)
    if change == START:
        with engine.begin() as tx:
            plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    clock.freeze()
    with engine.begin() as tx:
        now = tx.scalar(text("select durable.durable_now()"))
    clock.advance((plan.expires_at - now).total_seconds() + after)
    if passes:
        with engine.begin() as tx:
            assert tx.execute(text(change), {"id": plan.id, "stamped": stamped}).rowcount == 1
    else:
        assert "it expired at" in refused(engine, change, id=plan.id, stamped=stamped)
        assert shop.raw(plan.id).state == ("approved" if change == START else "pending")


MOVE = """
    update durable.plans
    set state = :state, fence = :fence, settled_fence = :settled,
        approved_by = case when state = 'pending' and :state in ('approved', 'executing', 'executed', 'failed')
            then 'dana' else approved_by end,
        approved_at = case when state = 'pending' and :state in ('approved', 'executing', 'executed', 'failed')
            then now() else approved_at end,
        approved_digest = digest,
        rejected_by = case when :state = 'rejected' then 'dana' end,
        owner = case when :state = 'executing' then 'psql' end,
        lease_expires_at = case when :state = 'executing' then now() end,
        deadline_at = case when :state = 'executing' then now() end,
        continue_until = coalesce(continue_until, now()),
        finished_at = case when :state in ('executed', 'failed', 'rejected', 'expired') then now() end
    where id = :id"""


def test_a_move_is_possible_exactly_when_the_table_of_states_has_it(shop, engine, worker):
    """By hand, with every fence a move could need. Executed needs its receipts, which no hand can write here."""
    legal = {(str(move.source), str(move.target)) for move in PLAN.moves}
    found, codes = set(), set()

    def reached(state):
        plan = shop.propose(shop.step().planned(1), expires=100)
        with engine.begin() as tx:
            if state == "rejected":
                plans.reject(tx, plan.id, by="dana")
            elif state == "expired":
                tx.execute(
                    text("update durable.plans set state = 'expired', finished_at = now() where id = :id"),
                    {"id": plan.id},
                )
            elif state != "pending":
                plans.approve(tx, plan.id, by="dana", digest=plan.digest)
        if state == "executing":
            shop.claim(plan)
        elif state == "executed":
            shop.run(worker, plan)
        elif state == "failed":
            failing = shop.approved(shop.step(lambda step: 1 / 0).planned())
            shop.run(worker, failing)
            return failing
        return plan

    for source in map(str, PLAN.states):
        made = reached(source)
        fence = shop.raw(made.id).fence
        for target in map(str, PLAN.states):
            if source == target:
                continue
            for raised, settled in ((0, 0), (1, 0), (0, fence), (1, fence + 1)):
                with engine.connect() as tx:
                    nested = tx.begin()
                    try:
                        tx.execute(
                            text(MOVE), {"id": made.id, "state": target, "fence": fence + raised, "settled": settled}
                        )
                        found.add((source, target))
                    except DBAPIError as error:
                        codes.add(error.orig.sqlstate)
                    nested.rollback()
    assert found == legal - {("executing", "executed")}
    assert codes <= {"55000", "23514"}
