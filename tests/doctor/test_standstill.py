"""What the doctor says of plans and operations that do not go on by themselves."""

import pytest
from sqlalchemy import text

from durable_core import deliveries, kinds, operation, operations, plans
from durable_core.claims.claim import Holder
from durable_core.cli.doctor import _due
from durable_core.database.connections import Database
from durable_core.doctor import standstill
from durable_core.doctor.database import inside, looking
from durable_core.doctor.findings import Reason, Status
from durable_core.doctor.standstill import OPERATIONS, PLANS
from tests.core.plan_shop import Shop
from tests.doctor.conftest import is_mendable, only


@pytest.fixture
def shop(owner):
    made = Shop(owner)
    yield made
    for name in made.declared:
        kinds.plan_steps.remove(name)


@pytest.fixture
def started(owner):
    """Start an operation of a kind, and of another one at the second call."""
    names = []

    def _started(name="test.doctor_call", **terms):
        kind = kinds.operations.find(name)
        if kind is None:
            kind = operation(name, **terms)(lambda step: None)
            kind.poll(lambda step, ids: {})
            names.append(name)
        with owner.begin() as tx:
            return kind.start(tx, by="dana").id

    yield _started
    for name in names:
        kinds.operations.remove(name)


@pytest.fixture
def forced(owner):
    """Change rows as they are found, whatever the guards say."""

    def _forced(table, change, **values):
        with owner.begin() as tx:
            tx.execute(text("set local session_replication_role = replica"))
            tx.execute(text(f"update durable.{table} set {change}"), values)

    return _forced


RUNS = (
    "state = 'running', fence = 1, settled_fence = 1, issued_at = durable.durable_now(), external_ids = '[\"a\"]',"
    " patience_until = durable.durable_now() + make_interval(secs => :patience),"
    " due_at = durable.durable_now() + make_interval(secs => :due)"
)


def test_where_nothing_stands_still_both_are_well(app, shop, started):
    shop.approved(shop.step().planned())
    started()
    for check in ("plans", "operations"):
        assert only(app, check).status is Status.PASS


def test_a_held_plan_is_told_with_its_reason_and_the_command_that_releases_it(app, shop, forced):
    plan = shop.propose(shop.step().planned())
    forced("plans", "held_reason = 'CheckViolation: the row of Mr Smith'")
    finding = only(app, "plans")
    assert is_mendable(finding, Reason.HELD_ROWS, Status.WARN)
    assert finding.observed == f"1 row of plan.step_1 made a sweep fail (CheckViolation) and is passed over, {plan.id}"
    assert f"durable plans release {plan.id} --by … --reason …" in finding.fix


def test_a_held_operation_is_told_with_its_reason_and_the_command_that_releases_it(app, started, forced):
    row_id = started()
    forced("operations", f"held_reason = 'CheckViolation: the row of Mr Smith', {RUNS}", patience=-99, due=-99)
    finding = only(app, "operations")
    assert is_mendable(finding, Reason.HELD_ROWS, Status.WARN)
    assert "(CheckViolation) and is passed over" in finding.observed
    assert f"durable operations release {row_id} --by … --reason …" in finding.fix


def test_one_among_several_is_named(app, shop, forced):
    step = shop.step()
    first, second = shop.propose(step.planned()), shop.propose(step.planned())
    forced("plans", "held_reason = 'odd'")
    assert only(app, "plans").observed.startswith("2 rows of plan.step_1 made a sweep fail (odd) and are passed over")
    assert min(first.id, second.id) in only(app, "plans").fix


@pytest.mark.parametrize(
    ("waits", "reason"),
    [("handler", Reason.WAITING_FOR_HANDLER), ("arguments", Reason.WAITING_FOR_ARGUMENTS)],
)
def test_an_operation_without_its_code_fails(app, started, forced, waits, reason):
    started()
    forced("operations", "waiting_for = :waits", waits=waits)
    finding = only(app, "operations")
    assert is_mendable(finding, reason, Status.FAIL)
    assert "test.doctor_call" in finding.observed


def test_a_step_without_its_code_fails(app, shop, forced):
    shop.approved(shop.step(queue="letters").planned())
    forced("plans", "waiting_for = 'handler'")
    finding = only(app, "plans")
    assert is_mendable(finding, Reason.WAITING_FOR_HANDLER, Status.FAIL)
    assert "on queue letters" in finding.observed


@pytest.mark.parametrize(
    ("change", "overdue"),
    [
        ("expires_at = durable.durable_now() - interval '61 s'", True),
        ("expires_at = durable.durable_now() - interval '59 s'", False),
        (
            "state = 'executing', fence = 1, settled_fence = 1, "
            "continue_until = durable.durable_now() - interval '61 s'",
            True,
        ),
        (
            "state = 'executing', fence = 1, owner = 'x', lease_expires_at = durable.durable_now() - interval '1 h',"
            " continue_until = durable.durable_now() - interval '1 h', deadline_at = durable.durable_now()",
            False,  # inside a step, and within its time
        ),
    ],
)
def test_a_plan_that_no_sweep_ended_in_time_warns(app, shop, forced, change, overdue):
    shop.approved(shop.step().planned())
    forced("plans", change)
    finding = only(app, "plans")
    if overdue:
        assert is_mendable(finding, Reason.PLAN_OVERDUE, Status.WARN)
        assert "1 row of plan.step_1 is past the time" in finding.observed
    else:
        assert finding.status is Status.PASS


@pytest.mark.parametrize(
    ("change", "values", "reason"),
    [
        ("start_before = durable.durable_now() - interval '61 s'", {}, Reason.OPERATION_OVERDUE),
        ("start_before = durable.durable_now() - interval '59 s'", {}, Reason.OK),
        (RUNS, {"patience": -61, "due": 5}, Reason.OPERATION_OVERDUE),
        (RUNS, {"patience": 300, "due": -61}, Reason.POLL_LATE),
        (RUNS, {"patience": 300, "due": -59}, Reason.OK),
    ],
)
def test_an_operation_that_nobody_polls_or_ends_warns(app, started, forced, change, values, reason):
    row_id = started()
    forced("operations", change, **values)
    finding = only(app, "operations")
    if reason is Reason.OK:
        assert finding.status is Status.PASS
    else:
        assert is_mendable(finding, reason, Status.WARN)
        assert row_id in finding.observed


CLAIMED = (
    "owner = 'x', lease_expires_at = durable.durable_now() - interval '61 s',"
    " deadline_at = durable.durable_now() - interval '61 s'"
)


def test_what_a_worker_has_kept_for_too_long_is_told_as_that(app, shop, started, forced):
    row_id = started()
    forced("operations", f"{RUNS}, {CLAIMED}", patience=300, due=5)
    finding = only(app, "operations")
    assert is_mendable(finding, Reason.OPERATION_OVERDUE, Status.WARN)
    assert finding.observed == (
        "1 row of test.doctor_call is past the time that its worker had for it, and no sweep has ended that, " + row_id
    )
    shop.approved(shop.step().planned())
    forced(
        "plans", f"state = 'executing', fence = 1, continue_until = durable.durable_now() + interval '1 h', {CLAIMED}"
    )
    assert "is past the time that its worker had for it" in only(app, "plans").observed


def test_kinds_that_nobody_declares_are_a_note(owner, shop, started):
    shop.propose(shop.step().planned())
    started()
    for of, kind in ((PLANS, "plan.step_1"), (OPERATIONS, "test.doctor_call")):
        (finding,) = inside(Database(owner), lambda tx, of=of: standstill.standing(tx, of, set()))()
        assert is_mendable(finding, Reason.KIND_UNDECLARED, Status.NOTE)
        assert finding.observed.endswith(f": {kind}")
        (finding,) = inside(Database(owner), lambda tx, of=of, kind=kind: standstill.standing(tx, of, {kind}))()
        assert finding.status is Status.PASS


def test_ended_ones_are_nobodys_business(app, owner, shop, started):
    plan = shop.propose(shop.step().planned())
    row_id = started()
    with owner.begin() as tx:
        plans.reject(tx, plan.id, by="dana")
        operations.cancel(tx, row_id, by="dana", reason="no")
    for check in ("plans", "operations"):
        assert only(app, check).status is Status.PASS


# --- the queues that somebody ought to read -----------------------------------------------------------


def due(engine):
    with looking(Database(engine)) as connection:
        return standstill.due_queues(connection)


PAUSE = {"by": "dana", "reason": "away"}


def test_a_step_that_waits_makes_its_queue_due_and_then_overdue(app, owner, shop, forced):
    shop.propose(shop.step(queue="letters").planned())
    assert due(app) == {}, "it waits for a person, not for a worker"
    plan = shop.approved(shop.step(queue="mail").planned())
    assert due(app) == {"mail": False}
    forced("plans", "approved_at = approved_at - interval '61 s'")
    assert due(app) == {"mail": True}
    with owner.begin() as tx:
        deliveries.pause(tx, "kind", plan.kind, **PAUSE)
    assert due(app) == {"mail": False}
    with owner.begin() as tx:
        deliveries.resume(tx, "kind", plan.kind, by="dana")
    shop.claim(plan, Holder())
    assert due(app) == {}, "a worker has it"


def test_a_step_after_a_receipt_waits_since_that(app, shop, forced):
    shop.approved(shop.step().planned())
    window = "continue_until = durable.durable_now() + (expires_at - created_at) - make_interval(secs => :ago)"
    forced("plans", f"state = 'executing', fence = 1, settled_fence = 1, {window}", ago=59)
    assert due(app) == {"durable": False}
    forced("plans", window, ago=61)
    assert due(app) == {"durable": True}
    forced("plans", "held_reason = 'odd'")
    assert due(app) == {"durable": False}


def test_an_operation_makes_its_queue_due_and_a_pause_holds_no_poll(app, owner, started, forced):
    started(queue="calls")
    assert due(app) == {"calls": False}
    forced("operations", "due_at = due_at - interval '61 s'")
    assert due(app) == {"calls": True}
    with owner.begin() as tx:
        deliveries.pause(tx, "queue", "calls", **PAUSE)
    assert due(app) == {"calls": False}
    forced("operations", RUNS, patience=300, due=-61)
    assert due(app) == {"calls": True}
    forced("operations", RUNS, patience=300, due=5)
    assert due(app) == {}


def test_the_doctor_asks_for_the_queues_of_every_contract(owner, shop, started, forced):
    shop.approved(shop.step(queue="shared").planned())
    started(queue="shared")
    started("test.doctor_other_call", queue="calls")
    forced("operations", "due_at = due_at - interval '61 s' where queue = 'shared'")
    assert _due(Database(owner)) == {"shared": True, "calls": False}
