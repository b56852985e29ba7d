"""Plans against a real database: proposed, approved as they are shown, carried out step by step, each once."""

import re
import time

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError

from durable_core import (
    DefinitionError,
    GiveUp,
    IllegalMove,
    InvalidOption,
    NotFound,
    PlanExpired,
    PlanRefused,
    Retry,
    RowBusy,
    SelfApproval,
    Snooze,
    StalePlan,
    Target,
    UnknownHandler,
    deliveries,
    kinds,
    plans,
)
from durable_core.celery_binding.flower.look import look
from durable_core.claims.shares import Share
from durable_core.deliveries.worker import Outcome
from durable_core.plans import attempt, sweep
from durable_core.plans.rows import Became
from durable_core.testing import drain
from tests.core.plan_shop import note, product_of, rename

MINUTE = 60


def boom(step, n=0):
    note(step, n)
    raise RuntimeError("boom")


# --- proposing -------------------------------------------------------------------------------------


@pytest.mark.spec("plans", 1)
def test_what_is_proposed_is_frozen_whatever_callers_do_to_it_afterwards(shop, engine):
    def tag(step, names: list[str], *, loud: bool = False) -> None: ...

    kind, names, scopes = shop.step(tag), ["a", "b"], ["x", "y"]
    plan = shop.propose(kind.planned(names, label="Tag it"), scopes=scopes, rationale="because")
    names.append("c")
    scopes.append("z")
    again = shop.get(plan.id)
    assert again.state == "pending"
    assert again.steps[0].arguments == {"names": ["a", "b"], "loud": False}, "defaults are frozen too"
    assert again.scopes == ("x", "y")
    assert re.fullmatch("[0-9a-f]{64}", again.digest)
    assert shop.lines(plan.id) == [("propose", None, "pending")]
    for column, value in (("steps", "'[]'"), ("scopes", "'{z}'"), ("digest", f"'{'0' * 64}'"), ("risk", "'low'")):
        with pytest.raises(Exception, match="never changes"), engine.begin() as tx:
            tx.execute(text(f"update durable.plans set {column} = {value} where id = :id"), {"id": plan.id})


def test_each_thing_that_is_consented_to_makes_another_digest(shop):
    kind = shop.step()
    same = {"scopes": ["a"], "risk": "low", "rationale": "r", "expires": 60, "origin": "o"}
    first = shop.propose(kind.planned(1), **same).digest
    assert shop.propose(kind.planned(1), **same).digest == first
    target = shop.product()
    others = [
        shop.propose(kind.planned(2), **same),
        shop.propose(kind.planned(1), kind.planned(1), **same),
        shop.propose(kind.planned(1, label="l"), **same),
        shop.propose(kind.planned(1, rationale="l"), **same),
        shop.propose(kind.planned(1, target=target), **same),
        shop.propose(shop.step().planned(1), **same),
        *(
            shop.propose(kind.planned(1), **{**same, name: other})
            for name, other in (
                ("scopes", ["b"]), ("risk", "high"), ("rationale", "s"), ("expires", 61), ("origin", "p"),
            )
        ),
        shop.propose(kind.planned(1), self_approval=False, **same),
        shop.propose(kind.planned(1), by="somebody", **same),
    ]  # fmt: skip
    assert len({first, *(plan.digest for plan in others)}) == len(others) + 1


def test_a_plan_is_refused_with_all_that_is_wrong_with_it_and_the_transaction_lives(shop, engine):
    kind, on_products = shop.step(), shop.step(rename, target="product")
    with engine.begin() as tx:
        with pytest.raises(PlanRefused) as refused:
            plans.propose(
                tx,
                [
                    kind.planned("seven"),
                    plans.planned("no.such_step", {"a": 1}),
                    on_products.planned(7, name="Oak"),
                    on_products.planned(7, name="Oak", target=Target("order", 7, version=1)),
                    kind.planned(1, target=Target("unread", 7, version=1)),
                    kind.planned(1, label="a\nb"),
                    kind.planned(1, target=Target("unread", True, version=1.5)),
                    "no step",
                ],
                by="assistant",
            )
        assert tx.scalar(text("select 1")) == 1
    problems = [(issue.step, issue.problem) for issue in refused.value.issues]
    assert [step for step, _ in problems] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 7]
    assert "argument 'n'" in problems[0][1]
    assert "no.such_step" in problems[1][1]
    assert "no reviewed target" in problems[2][1]
    assert "is a order" in problems[3][1] or "is an order" in problems[3][1]
    assert "step 1: argument 'n'" in str(refused.value)
    with engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.plans")) == 0


@pytest.mark.parametrize(("steps", "said"), [(0, "no step"), (11, "10 are the most")])
def test_a_plan_has_one_to_ten_steps(shop, steps, said):
    kind = shop.step()
    with pytest.raises(PlanRefused, match=said):
        shop.propose(*[kind.planned(1)] * steps)
    assert len(shop.propose(*[kind.planned(1)] * 10).steps) == 10


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("by", ""), ("scopes", "catalog:write"), ("scopes", [1]), ("expires", 0), ("expires", -1), ("risk", "huge"),
        ("origin", ""), ("origin", "a\nb"), ("rationale", "nul \x00"), ("self_approval", "no"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_refused(shop, option, bad):
    kind = shop.step()
    with pytest.raises(InvalidOption) as refused:
        shop.propose(kind.planned(1), **{option: bad})
    assert refused.value.option == option


def test_a_declaration_that_cannot_work_is_refused(shop):
    async def asleep(step): ...

    def aims(step, target: int): ...

    with pytest.raises(DefinitionError, match="plain function"):
        shop.step(asleep)
    with pytest.raises(DefinitionError, match="rename it"):
        shop.step(aims)
    kind = shop.step()
    with pytest.raises(DefinitionError, match="twice"):
        shop.step(name=kind.name)

    def versioned(step, product_id: int, version: int): ...

    async def asked(arguments): ...

    assert shop.step(versioned).planned(1, version=2).kwargs == {"version": 2}
    with pytest.raises(DefinitionError, match="rename it"):
        shop.step(versioned, target=product_of)
    for target in (asked, 7, "", dict):
        with pytest.raises(DefinitionError, match="target is text"):
            shop.step(target=target)


# --- what a step changes ---------------------------------------------------------------------------


def test_a_target_is_told_from_the_arguments_and_one_beside_them_is_refused(shop, engine):
    shop.product()
    kind, by_name = shop.step(rename, target=product_of), shop.step(rename, target="product")
    of_some = shop.step(note, target=lambda arguments: ("product", arguments["n"]) if arguments["n"] else None)
    target = Target("product", 7, version=3)
    with pytest.raises(PlanRefused) as refused:
        shop.propose(
            kind.planned(8, name="Oak", target=target),
            kind.planned(7, name="Oak", target=Target("product", "7", version=3)),
            kind.planned(7, name="Oak"),
            kind.planned(7, name="Oak", target=target, version=3),
            kind.planned(7, name="Oak", version=1.5),
            of_some.planned(0, version=3),
            of_some.planned(0, target=target),
            plans.planned(by_name.name, {"product_id": 7, "name": "Oak"}, version=3),
            shop.step(note, target=lambda arguments: ("unread", arguments["n"])).planned(1, version=1),
        )
    problems = [(issue.step, issue.problem) for issue in refused.value.issues]
    assert [step for step, _ in problems] == list(range(9))
    assert problems[0][1] == "its arguments name product 8, and its target is product 7"
    assert problems[1][1] == "its arguments name product 7, and its target is product '7'"
    assert problems[2][1] == "its arguments name product 7, and no reviewed version of it is given"
    assert "one of them is enough" in problems[3][1]
    assert "version is a whole number or text" in problems[4][1]
    assert [problems[n][1].rsplit(", ", 1)[1] for n in (5, 6)] == ["and a version is given", "and a target is given"]
    assert "give target=Target(...)" in problems[7][1]
    assert "no target_version('unread')" in problems[8][1]
    named = Target("product", 7, version=3, name="the ash")
    plan = shop.propose(
        kind.planned(7, name="Oak", version=3),
        plans.planned(kind.name, {"product_id": 7, "name": "Oak"}, version=3),
        kind.planned(7, name="Oak", target=named),
        of_some.planned(0),
    )
    assert [step.target for step in plan.steps] == [target, target, named, None]


def test_a_function_that_tells_no_target_is_a_broken_declaration_and_the_transaction_lives(shop, engine):
    for told in ("product", ("product",), (7, 7), ["product", 7]):
        kind = shop.step(note, target=lambda arguments, told=told: told)
        with engine.begin() as tx:
            with pytest.raises(DefinitionError, match=re.escape("(kind, id), or None")):
                plans.propose(tx, [kind.planned(1, version=1)], by="assistant")
            assert tx.scalar(text("select count(*) from durable.plans")) == 0


def test_a_target_told_from_the_arguments_is_compared_and_given_to_the_handler(shop, worker):
    given = []

    def look_and_rename(step, product_id: int, *, name: str):
        given.append(step.target)
        return rename(step, product_id, name=name)

    kind = shop.step(look_and_rename, target=product_of)
    shop.product(version=3)
    once = [shop.approved(kind.planned(7, name=name, version=3)) for name in ("Oak", "Elm")]
    assert shop.run(worker, once[0])[0].outcome is Outcome.DONE
    assert shop.run(worker, once[1])[0].error_code == "CONFLICT"
    assert (given, shop.name_of()) == ([Target("product", 7, version=3)], "Oak")
    plain = shop.approved(shop.step(lambda step: given.append(step.target)).planned())
    assert shop.run(worker, plain)[0].outcome is Outcome.DONE
    assert given[1:] == [None]


@pytest.mark.parametrize("frozen", [Target("product", 7, version=3), None])
def test_a_plan_of_older_code_whose_target_is_not_what_its_arguments_name_writes_nothing(shop, worker, frozen):
    """The code that proposed it did not tell the target from the arguments; the code that runs it does."""
    shop.product(7)
    shop.product(8, name="Elm")
    kind = shop.step(rename)
    plan = shop.approved(kind.planned(8, name="Oak", target=frozen))
    kinds.plan_steps.remove(kind.name)
    shop.step(rename, name=kind.name, target=product_of)
    assert shop.run(worker, plan)[0].error_code == "NO_BASELINE"
    assert shop.name_of(8) == "Elm"
    told = "product 7 was reviewed" if frozen else "no reviewed one was proposed"
    assert told in shop.get(plan.id).error_message


# --- approving -------------------------------------------------------------------------------------


@pytest.mark.spec("plans", 2)
def test_of_two_approvals_the_first_stays(shop, engine):
    plan = shop.approved(shop.step().planned(1))
    with pytest.raises(IllegalMove), engine.begin() as tx:
        plans.approve(tx, plan.id, by="eve", digest=plan.digest)
    assert (shop.get(plan.id).approved_by, shop.get(plan.id).state) == ("dana", "approved")


@pytest.mark.spec("plans", 3)
def test_rejected_stays_rejected_and_approved_cannot_be_rejected(shop, engine):
    kind = shop.step()
    plan, other = shop.propose(kind.planned(1)), shop.approved(kind.planned(1))
    with engine.begin() as tx:
        plans.reject(tx, plan.id, by="dana", reason="not today")
    with pytest.raises(IllegalMove), engine.begin() as tx:
        plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    with pytest.raises(IllegalMove), engine.begin() as tx:
        plans.reject(tx, other.id, by="dana")
    got = shop.get(plan.id)
    assert (got.state, got.rejected_by, got.rejected_reason) == ("rejected", "dana", "not today")
    assert shop.get(other.id).state == "approved"


@pytest.mark.spec("plans", 5)
def test_a_minute_after_its_expiry_an_approval_is_refused_and_the_next_read_says_expired(shop, engine, clock):
    plan = shop.propose(shop.step().planned(1))
    clock.advance(16 * MINUTE)
    with engine.begin() as tx:
        with pytest.raises(PlanExpired):
            plans.approve(tx, plan.id, by="dana", digest=plan.digest)
        assert tx.scalar(text("select 1")) == 1
    assert (shop.raw(plan.id).state, shop.raw(plan.id).approved_by) == ("pending", None), "the refusal writes nothing"
    assert shop.get(plan.id).state == "expired"
    assert shop.raw(plan.id).state == "expired"
    assert shop.lines(plan.id)[-1] == ("expire", "pending", "expired")


@pytest.mark.spec("plans", 6)
def test_an_approval_just_in_time_is_no_start_in_time(shop, worker, database, clock):
    plan = shop.propose(shop.step().planned(1), expires=60)
    clock.advance(59)
    with shop.engine.begin() as tx:
        plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    clock.advance(2)
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    assert shop.raw(plan.id).state == "approved"
    assert sweep.expire(database) == 1
    assert shop.raw(plan.id).state == "expired"
    assert "did not start" in shop.get(plan.id).error_message
    assert shop.receipts(plan.id) == []


@pytest.mark.spec("plans", 7)
def test_at_the_very_instant_of_its_expiry_it_can_be_expired_and_not_approved(shop, engine, database, clock):
    plan = shop.propose(shop.step().planned(1), expires=60)
    clock.freeze()
    with engine.begin() as tx:
        tx.execute(
            text(
                "update durable.test_clock c set moved_by = p.expires_at - c.frozen_at"
                " from durable.plans p where p.id = :id"
            ),
            {"id": plan.id},
        )
    with pytest.raises(PlanExpired), engine.begin() as tx:
        plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    with pytest.raises(PlanExpired), engine.begin() as tx:
        plans.reject(tx, plan.id, by="dana")
    assert sweep.expire(database) == 1
    assert shop.raw(plan.id).state == "expired"


def test_an_approval_names_what_was_shown(shop, engine):
    """The digest of another plan, swapped between the read and the click, approves nothing."""
    kind = shop.step()
    shown, swapped = shop.propose(kind.planned(1)), shop.propose(kind.planned(2))
    for digest in (shown.digest, swapped.digest[:63], swapped.digest.upper(), "", "\x00"):
        with engine.begin() as tx:
            with pytest.raises(StalePlan):
                plans.approve(tx, swapped.id, by="dana", digest=digest)
            assert tx.scalar(text("select 1")) == 1
    assert shop.raw(swapped.id).state == "pending"
    assert shop.lines(swapped.id) == [("propose", None, "pending")]


def test_whoever_proposed_what_is_risky_does_not_approve_it(shop, engine):
    kind = shop.step()
    risky, decided = shop.propose(kind.planned(1), risk="high"), shop.propose(kind.planned(1), self_approval=False)
    for plan in (risky, decided):
        with pytest.raises(SelfApproval), engine.begin() as tx:
            plans.approve(tx, plan.id, by="assistant", digest=plan.digest)
        assert shop.raw(plan.id).state == "pending"
        with engine.begin() as tx:
            plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    allowed = shop.propose(kind.planned(1), risk="high", self_approval=True)
    with engine.begin() as tx:
        plans.approve(tx, allowed.id, by="assistant", digest=allowed.digest)
    assert shop.raw(allowed.id).state == "approved"


def test_a_plan_of_another_origin_is_not_there(shop, engine):
    plan = shop.propose(shop.step().planned(1), origin="conversation 1")
    with engine.begin() as tx:
        for origin in ("conversation 2", ""):
            for act in (
                lambda o=origin: plans.get(tx, plan.id, origin=o),
                lambda o=origin: plans.report(tx, plan.id, origin=o),
                lambda o=origin: plans.approve(tx, plan.id, by="dana", digest=plan.digest, origin=o),
                lambda o=origin: plans.reject(tx, plan.id, by="dana", origin=o),
                lambda o=origin: plans.compensate(tx, plan.id, by="dana", origin=o),
                lambda o=origin: plans.release(tx, plan.id, by="dana", reason="mended", origin=o),
                lambda o=origin: plans.journal(tx, plan.id, origin=o),
                lambda o=origin: plans.previous(tx, plan.id, origin=o),
            ):
                with pytest.raises(NotFound):
                    act()
        plans.approve(tx, plan.id, by="dana", digest=plan.digest, origin="conversation 1")
        assert [line.move for line in plans.journal(tx, plan.id, origin="conversation 1")] == ["propose", "approve"]
        with pytest.raises(IllegalMove):
            plans.release(tx, plan.id, by="dana", reason="mended", origin="conversation 1")
        for read in (plans.journal, plans.previous):
            with pytest.raises(NotFound):
                read(tx, "0198a4c4-0000-7000-8000-000000000000")
        for limit in (0, -1, 10_001, True, "9"):
            with pytest.raises(InvalidOption):
                plans.journal(tx, plan.id, limit=limit)
    for unknown in ("0198a4c4-0000-7000-8000-000000000000", "seven", 7):
        with pytest.raises(NotFound), engine.begin() as tx:
            plans.get(tx, unknown)


def test_an_approval_is_hinted_after_the_commit_and_not_after_a_rollback(shop, database, carrier):
    kind = shop.step(queue="careful")
    plan = shop.propose(kind.planned(1))
    with database.sessions() as session:
        plans.approve(session, plan.id, by="dana", digest=plan.digest)
        assert carrier.offered == []
        session.rollback()
    assert carrier.offered == []
    with database.sessions() as session, session.begin():
        plans.approve(session, plan.id, by="dana", digest=plan.digest)
    assert [(hint.kind, hint.id, hint.queue) for hint in carrier.offered] == [(kind.name, plan.id, "careful")]


# --- the steps -------------------------------------------------------------------------------------


@pytest.mark.spec("plans", 8)
def test_two_steps_that_are_ok_leave_two_receipts_and_the_plan_executed(shop, worker, carrier):
    first, second = shop.step(), shop.step(queue="other")
    plan = shop.approved(first.planned(1), second.planned(2))
    assert [done.outcome for done in shop.run(worker, plan, 2)] == [Outcome.DONE] * 2
    got = shop.get(plan.id)
    assert got.state == "executed"
    assert got.finished_at is not None
    assert [(r.step, r.outcome, r.output) for r in got.receipts] == [(0, "ok", 1), (1, "ok", 2)]
    assert shop.effects(plan.id) == ["0:1", "1:2"]
    hinted = [(hint.kind, hint.queue, hint.attempt) for hint in carrier.offered]
    assert (second.name, "other", 2) in hinted
    assert shop.lines(plan.id) == [
        ("propose", None, "pending"), ("approve", "pending", "approved"), ("take", "approved", "executing"),
        ("settle", "executing", "executed"),
    ]  # fmt: skip


@pytest.mark.spec("plans", 9)
def test_a_step_that_fails_stops_the_plan_and_leaves_no_effect_of_its_own(shop, worker):
    ok, bad = shop.step(), shop.step(boom)
    plan = shop.approved(ok.planned(1), bad.planned(2), ok.planned(3))
    assert [done.outcome for done in shop.run(worker, plan, 3)] == [
        Outcome.DONE, Outcome.FAILED, Outcome.NOTHING_TO_DO,
    ]  # fmt: skip
    assert shop.receipts(plan.id) == [(0, "ok"), (1, "failed")]
    assert shop.effects(plan.id) == ["0:1"]
    got = shop.get(plan.id)
    assert (got.state, got.error_code) == ("failed", "WORKER_ERROR")
    assert "boom" in got.receipts[1].error_message
    with shop.engine.begin() as tx:
        report = plans.report(tx, plan.id)
    assert [line.became for line in report.lines] == [Became.DONE, Became.FAILED, Became.NOT_RUN]
    assert "1 of 3 steps done; what is done stays done" in report.text


@pytest.mark.spec("plans", 10)
def test_a_target_that_moved_since_it_was_reviewed_is_a_conflict_and_stays_untouched(shop, worker):
    kind = shop.step(rename, target="product")
    plan = shop.approved(kind.planned(7, name="Oak", target=shop.product(version=3)))
    shop.move()
    assert shop.run(worker, plan)[0].error_code == "CONFLICT"
    got = shop.get(plan.id)
    assert (got.state, got.reason) == ("failed", "conflict")
    assert shop.receipts(plan.id) == [(0, "conflict")]
    assert shop.name_of() == "Ash"
    assert "version 3 and is at 4" in got.error_message


def test_a_target_that_is_gone_is_a_conflict_and_one_that_stayed_is_changed(shop, worker):
    kind = shop.step(rename, target="product")
    plan = shop.approved(kind.planned(7, name="Oak", target=shop.product()))
    gone = shop.approved(kind.planned(8, name="Oak", target=Target("product", 8, version=1)))
    text_version = shop.approved(kind.planned(7, name="Elm", target=Target("product", 7, version="4")))
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert shop.name_of() == "Oak"
    for other in (gone, text_version):
        assert shop.run(worker, other)[0].error_code == "CONFLICT"
    assert shop.name_of() == "Oak"


@pytest.mark.spec("plans", 11)
def test_where_the_receipt_cannot_be_written_the_effect_is_absent_and_the_plan_failed(shop, worker, engine):
    with engine.begin() as tx:
        tx.execute(text("alter table durable.plan_receipts add constraint never check (plan_id is null) not valid"))
    try:
        plan = shop.approved(shop.step().planned(1))
        assert shop.run(worker, plan)[0].error_code == "RECEIPT_REFUSED"
    finally:
        with engine.begin() as tx:
            tx.execute(text("alter table durable.plan_receipts drop constraint never"))
    assert shop.effects(plan.id) == []
    assert shop.receipts(plan.id) == []
    assert (shop.raw(plan.id).state, shop.raw(plan.id).error_code) == ("failed", "RECEIPT_REFUSED")


@pytest.mark.spec("plans", 17)
def test_a_hint_that_comes_again_while_a_step_is_claimed_does_nothing(shop, worker):
    plan = shop.approved(shop.step().planned(1))
    claim = shop.claim(plan)
    before = shop.raw(plan.id)
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    assert shop.raw(plan.id) == before
    assert attempt.carry_out(worker, shop_kind(plan), claim).outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1"]


@pytest.mark.spec("plans", 18)
def test_a_hint_that_comes_after_the_end_does_nothing(shop, worker):
    plan = shop.approved(shop.step().planned(1))
    shop.run(worker, plan)
    before = shop.raw(plan.id)
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    assert shop.raw(plan.id) == before
    assert shop.effects(plan.id) == ["0:1"]


@pytest.mark.spec("plans", 20)
def test_a_scope_that_was_not_granted_fails_the_step_whatever_an_approval_says(shop, worker, engine):
    kind = shop.step(scope="catalog:write")
    plan = shop.propose(kind.planned(1), scopes=["catalog:read"])
    with engine.begin() as tx:
        with pytest.raises(TypeError):
            plans.approve(tx, plan.id, by="dana", digest=plan.digest, scopes=["catalog:write"])
        plans.approve(tx, plan.id, by="dana", digest=plan.digest)
    assert shop.run(worker, plan)[0].error_code == "SCOPE_NOT_GRANTED"
    assert shop.receipts(plan.id) == [(0, "failed")]
    assert shop.effects(plan.id) == []
    granted = shop.approved(kind.planned(1), scopes=["catalog:write"])
    assert shop.run(worker, granted)[0].outcome is Outcome.DONE


@pytest.mark.spec("plans", 21)
def test_what_has_ended_answers_the_same_every_time(shop, worker, engine):
    plan = shop.approved(shop.step().planned(1), shop.step(boom).planned(2), shop.step().planned(3))
    shop.run(worker, plan, 2)
    before = shop.raw(plan.id)
    answers = set()
    for _ in range(100):
        with engine.begin() as tx:
            answers.add((plans.report(tx, plan.id).text, plans.get(tx, plan.id).finished_at))
    assert len(answers) == 1
    assert shop.raw(plan.id) == before


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (Retry("again"), "RETRY_ASKED"), (Snooze(5), "SNOOZED"), (GiveUp("never", code="NO_STOCK"), "NO_STOCK"),
        (ValueError("x"), "WORKER_ERROR"),
    ],
)  # fmt: skip
def test_whatever_a_step_raises_is_its_one_failure(shop, worker, raised, code):
    def handler(step, n=0):
        note(step, n)
        raise raised

    plan = shop.approved(shop.step(handler).planned(1))
    assert shop.run(worker, plan)[0].error_code == code
    assert shop.receipts(plan.id) == [(0, "failed")]
    assert shop.effects(plan.id) == []


def test_a_step_that_breaks_its_transaction_still_has_its_receipt(shop, worker):
    def handler(step):
        note(step)
        step.session.execute(text("select 1 / 0"))

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    assert shop.receipts(plan.id) == [(0, "failed")]
    assert shop.effects(plan.id) == []


def test_a_step_that_swallows_its_database_error_has_failed(shop, worker):
    def handler(step):
        note(step)
        try:
            step.session.execute(text("select 1 / 0"))
        except Exception:
            return "fine"

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    assert shop.receipts(plan.id) == [(0, "failed")]
    assert shop.effects(plan.id) == []


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_step_that_ends_the_transaction_behind_our_back_fails_and_says_so(shop, worker, ending):
    def handler(step):
        note(step)
        step.connection.exec_driver_sql(ending)

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].error_code == "EFFECT_ESCAPED"
    assert shop.receipts(plan.id) == [(0, "failed")]
    assert shop.get(plan.id).state == "failed"


@pytest.mark.parametrize("call", ["commit", "rollback", "close"])
def test_a_step_may_not_end_its_transaction(shop, worker, call):
    def handler(step):
        note(step)
        getattr(step.session, call)()

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    assert shop.effects(plan.id) == []


def test_a_savepoint_of_the_steps_own_is_its_own(shop, worker):
    def handler(step):
        note(step, 1)
        with step.session.begin_nested() as mine:
            note(step, 2)
            mine.rollback()
        step.session.begin_nested()
        note(step, 3)

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1", "0:3"]


def test_a_step_that_rolls_back_our_savepoint_keeps_nothing_it_wrote_after_it(shop, worker):
    def handler(step):
        note(step, 1)
        step.session.get_nested_transaction().rollback()
        note(step, 2)

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    assert shop.effects(plan.id) == []
    assert shop.receipts(plan.id) == [(0, "failed")]


def test_a_constraint_that_is_checked_at_commit_fails_the_step_and_not_the_receipt(shop, worker, engine):
    with engine.begin() as tx:
        tx.execute(text("create table parents (id int primary key)"))
        tx.execute(text("create table children (of int references parents (id) deferrable initially deferred)"))

    def handler(step):
        step.session.execute(text("insert into children values (7)"))

    try:
        plan = shop.approved(shop.step(handler).planned())
        assert shop.run(worker, plan)[0].error_code == "WORKER_ERROR"
        assert shop.receipts(plan.id) == [(0, "failed")]
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop table children, parents"))


def test_a_step_is_told_what_it_is(shop, worker):
    seen = {}

    def handler(step, n):
        seen.update(id=step.id, key=step.key, index=step.index, kind=step.kind, deadline=step.deadline)
        assert step.connection is step.session.connection()
        assert not hasattr(step, "in_commit")

    kind = shop.step(handler)
    plan = shop.approved(shop.step().planned(1), kind.planned(2))
    shop.run(worker, plan, 2)
    assert seen["key"] == f"{plan.id}:1"
    assert (seen["id"], seen["index"], seen["kind"]) == (plan.id, 1, kind.name)
    assert shop.get(plan.id).state == "executed"


def test_a_hint_of_another_kind_than_the_next_step_takes_nothing(shop, worker):
    """Each step may have workers of its own: who has the code of the second must not be given the first."""
    first, second = shop.step(), shop.step()
    plan = shop.approved(first.planned(1), second.planned(2))
    assert attempt.perform(worker, second, plan.id).outcome is Outcome.NOTHING_TO_DO
    assert attempt.perform(worker, first, plan.id).outcome is Outcome.DONE
    assert attempt.perform(worker, first, plan.id).outcome is Outcome.NOTHING_TO_DO
    assert attempt.perform(worker, second, plan.id).outcome is Outcome.DONE
    assert shop.effects(plan.id) == ["0:1", "1:2"]


def test_a_step_that_was_renamed_carries_out_plans_of_its_old_name(shop, worker):
    plan = shop.approved(shop.step(name="plan.old").planned(1))
    kinds.plan_steps.remove("plan.old")
    renamed = shop.step(name="plan.new", formerly=("plan.old",))
    assert attempt.perform(worker, renamed, plan.id).outcome is Outcome.DONE
    assert shop.get(plan.id).receipts[0].kind == "plan.old"


def test_what_a_step_enqueues_commits_with_it_or_not_at_all(shop, worker, kind, carrier):
    def handler(step, fails):
        kind.enqueue(step.session, 1)
        if fails:
            raise RuntimeError("no")

    step = shop.step(handler)
    ok, bad = shop.approved(step.planned(False)), shop.approved(step.planned(True))
    for plan in (ok, bad):
        shop.run(worker, plan)
    with shop.engine.connect() as tx:
        assert tx.scalar(text("select count(*) from durable.deliveries")) == 1
    assert [hint.kind for hint in carrier.offered].count(kind.name) >= 1


def test_arguments_that_no_longer_fit_the_code_fail_the_step(shop, worker):
    plan = shop.approved(shop.step(name="plan.moves_on").planned(1))
    kinds.plan_steps.remove("plan.moves_on")

    def other(step, words: str): ...

    shop.step(other, name="plan.moves_on")
    assert shop.run(worker, plan)[0].error_code == "INVALID_ARGUMENTS"
    assert shop.receipts(plan.id) == [(0, "failed")]


def test_a_deadlock_is_nobodys_failure_and_the_step_runs_again_whole(shop, worker):
    from psycopg.errors import DeadlockDetected

    runs = []

    def handler(step):
        note(step, len(runs))
        runs.append(1)
        if len(runs) == 1:
            step.connection.exec_driver_sql("do $$ begin raise exception 'dead' using errcode = '40P01'; end $$")

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE
    assert DeadlockDetected.sqlstate == "40P01"
    assert shop.effects(plan.id) == ["0:1"]
    assert len(runs) == 2


def test_a_step_that_always_meets_the_machine_room_is_given_back_with_nothing_written(shop, worker, clock, database):
    def handler(step):
        note(step)
        step.connection.exec_driver_sql("do $$ begin raise exception 'again' using errcode = '40001'; end $$")

    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].outcome is Outcome.INTERRUPTED
    row = shop.raw(plan.id)
    assert (row.state, row.owner, row.receipts, row.error_code) == ("executing", None, 0, None)
    assert shop.effects(plan.id) == []
    assert shop.receipts(plan.id) == []
    assert shop.claim(plan) is not None, "another worker may take it"


def test_a_lock_timeout_of_the_hosts_own_is_the_steps_failure(shop, worker, engine):
    shop.product()

    def handler(step):
        step.session.execute(text("set local lock_timeout = '10ms'"))
        step.session.execute(text("select from products where id = 7 for update"))

    plan = shop.approved(shop.step(handler).planned())
    with engine.begin() as tx:
        tx.execute(text("select from products where id = 7 for update"))
        assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    assert shop.receipts(plan.id) == [(0, "failed")]


def test_a_time_limit_fails_the_step_and_leaves_no_connection_behind(shop, make_worker):
    class Limit(Exception): ...

    def handler(step):
        note(step)
        raise Limit

    worker = make_worker()
    worker.time_limits = (Limit,)
    plan = shop.approved(shop.step(handler).planned())
    assert shop.run(worker, plan)[0].error_code == "TIMEOUT"
    worker.heartbeat.stop()
    shop.engine.dispose()
    others = text(
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    with shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tx:
        until = time.monotonic() + 20
        while tx.scalar(others):
            assert time.monotonic() < until, "its connection stays open in a pool that nobody uses"
            time.sleep(0.02)
    assert (shop.receipts(plan.id), shop.effects(plan.id)) == ([(0, "failed")], [])


@pytest.mark.parametrize("sent", [False, True], ids=["before COMMIT", "after COMMIT"])
def test_a_time_limit_that_strikes_around_the_commit_leaves_the_truth(shop, make_worker, sent):
    """The receipt says what stands: the step is done, or it ran out of time and left nothing."""

    class Limit(Exception): ...

    worker, struck = make_worker(), []
    worker.time_limits = (Limit,)

    def strike(session):
        if not struck and not session.in_nested_transaction():  # a released savepoint tells of a commit too
            struck.append(True)
            raise Limit

    maker, when = worker.database.sessions, "after_commit" if sent else "before_commit"
    event.listen(maker, when, strike)
    try:
        plan = shop.approved(shop.step().planned(1))
        attempted = shop.run(worker, plan)[0]
    finally:
        event.remove(maker, when, strike)
    assert struck
    if sent:
        assert (attempted.outcome, shop.receipts(plan.id)) == (Outcome.DONE, [(0, "ok")])
        assert shop.effects(plan.id) == ["0:1"]
    else:
        assert (attempted.error_code, shop.receipts(plan.id), shop.effects(plan.id)) == ("TIMEOUT", [(0, "failed")], [])


def test_a_step_that_ends_its_process_has_failed_interrupted(shop, worker):
    def handler(step):
        note(step)
        raise SystemExit(3)

    plan = shop.approved(shop.step(handler).planned())
    with pytest.raises(SystemExit):
        shop.run(worker, plan)
    assert (shop.raw(plan.id).state, shop.raw(plan.id).error_code) == ("failed", "INTERRUPTED")
    assert shop.effects(plan.id) == []


def test_a_hosts_commit_event_that_raises_takes_the_effect_and_the_plan_fails(shop, worker, database):
    def refuse(session):
        raise RuntimeError("no commit today")

    maker = database.sessions
    event.listen(maker, "before_commit", refuse)
    try:
        plan = shop.approved(shop.step().planned(1))
        assert shop.run(worker, plan)[0].outcome is Outcome.FAILED
    finally:
        event.remove(maker, "before_commit", refuse)
    assert shop.effects(plan.id) == []


# --- paused, held, unknown -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["kind", "queue"])
def test_what_is_paused_is_not_claimed_and_not_hinted(shop, worker, engine, database, what):
    kind = shop.step(queue="careful")
    plan = shop.approved(kind.planned(1))
    name = kind.name if what == "kind" else "careful"
    with engine.begin() as tx:
        deliveries.pause(tx, what, name, by="dana", reason="inventory")
    assert shop.run(worker, plan)[0].outcome is Outcome.NOTHING_TO_DO
    with database.transaction() as connection:
        assert sweep.pick(connection, {"careful": Share(9, empty=True)}) == []
    with engine.begin() as tx:
        deliveries.resume(tx, what, name, by="dana")
    assert shop.run(worker, plan)[0].outcome is Outcome.DONE


# --- the test kit and Flower ---------------------------------------------------------------------------


def test_drain_carries_out_plans_and_what_their_steps_enqueue(shop, engine, declare, row):
    mail = declare()
    made = []

    def handler(step, n):
        made.append(mail.enqueue(step.session, n).id)
        return n

    step = shop.step(handler)
    plan, failing = shop.approved(step.planned(1), step.planned(2)), shop.approved(shop.step(boom).planned(1))
    waiting = shop.propose(step.planned(3))
    paused = shop.approved(shop.step(queue="paused").planned(1))
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "paused", by="dana", reason="test")
    outcomes = sorted(done.outcome for done in drain(engine))
    assert outcomes == ["done", "done", "failed", "sent", "sent"]
    assert shop.get(plan.id).state == "executed"
    assert {row(row_id).state for row_id in made} == {"sent"}
    assert (shop.get(failing.id).state, shop.get(waiting.id).state) == ("failed", "pending")
    assert shop.get(paused.id).state == "approved"
    assert drain(engine) == []
    plain = shop.step()
    shop.approved(plain.planned(1), plain.planned(2))
    with pytest.raises(AssertionError, match="a step of plan"):
        drain(engine, queue="durable", limit=1)


def test_flower_looks_at_a_plan_without_what_its_steps_said(shop, database, worker):
    def handler(step):
        raise GiveUp("the customer's name", code="NO_STOCK")

    plan = shop.approved(shop.step(handler).planned())
    shop.run(worker, plan)
    seen = look(database, plan.id)
    assert seen.summary == f"plan {plan.id} failed (NO_STOCK): 0 of 1 steps done"
    assert "customer" in seen.text


# --- compensation ----------------------------------------------------------------------------------


def test_a_compensation_is_a_new_plan_from_the_receipts_last_first(shop, worker, engine):
    target = shop.product()
    naming, plain, fails = shop.step(rename), shop.step(), shop.step(boom)

    @naming.compensation
    def name_back(arguments, output):
        return naming.planned(arguments["product_id"], name=output["old"])

    plan = shop.approved(
        naming.planned(7, name="Oak", target=target), plain.planned(1), naming.planned(7, name="Elm"),
        fails.planned(2), scopes=["s"], origin="o",
    )  # fmt: skip
    shop.run(worker, plan, 4)
    assert shop.name_of() == "Elm"
    with engine.begin() as tx:
        made = plans.compensate(tx, plan.id, by="assistant")
    assert shop.name_of() == "Elm", "nothing is rolled back by proposing it"
    assert [line.step for line in made.not_compensated] == [1]
    assert [step.arguments["name"] for step in made.plan.steps] == ["Oak", "Ash"]
    assert (made.plan.state, made.plan.compensates, made.plan.scopes) == ("pending", plan.id, ("s",))
    with pytest.raises(IllegalMove, match="compensated by plan"), engine.begin() as tx:
        plans.compensate(tx, plan.id, by="assistant")
    with engine.begin() as tx:
        plans.approve(tx, made.plan.id, by="dana", digest=made.plan.digest)
    shop.run(worker, made.plan, 2)
    assert shop.name_of() == "Ash"


def test_a_rejected_compensation_may_be_proposed_again(shop, worker, engine):
    kind = shop.step()
    kind.compensation(lambda arguments, output: kind.planned(output))
    plan = shop.approved(kind.planned(1))
    with pytest.raises(IllegalMove, match="executed or failed"), engine.begin() as tx:
        plans.compensate(tx, plan.id, by="assistant")
    shop.run(worker, plan)
    for _ in range(2):
        with engine.begin() as tx:
            made = plans.compensate(tx, plan.id, by="assistant")
            plans.reject(tx, made.plan.id, by="dana")


def test_what_a_compensation_did_before_it_failed_is_not_done_again(shop, worker, engine):
    kind, fails = shop.step(), shop.step(boom)
    kind.compensation(lambda arguments, output: kind.planned(output))
    first = shop.step()
    first.compensation(lambda arguments, output: fails.planned(1))
    plan = shop.approved(first.planned(1), kind.planned(2))
    shop.run(worker, plan, 2)
    with engine.begin() as tx:
        made = plans.compensate(tx, plan.id, by="assistant").plan
        plans.approve(tx, made.id, by="dana", digest=made.digest)
    shop.run(worker, made, 2)
    assert (shop.get(made.id).state, shop.get(made.id).receipts[0].outcome) == ("failed", "ok")
    with pytest.raises(IllegalMove, match=made.id), engine.begin() as tx:
        plans.compensate(tx, plan.id, by="assistant")


def test_where_nothing_makes_up_for_it_no_plan_is_proposed(shop, worker, engine):
    plain, nothing_to_do = shop.step(), shop.step()
    nothing_to_do.compensation(lambda arguments, output: None)
    plan, failed = shop.approved(plain.planned(1), nothing_to_do.planned(2)), shop.approved(shop.step(boom).planned(1))
    shop.run(worker, plan, 2)
    shop.run(worker, failed)
    with engine.begin() as tx:
        made = plans.compensate(tx, plan.id, by="assistant")
    assert made.plan is None
    assert [line.step for line in made.not_compensated] == [1, 0]
    with pytest.raises(IllegalMove, match="no step done"), engine.begin() as tx:
        plans.compensate(tx, failed.id, by="assistant")
    kinds.plan_steps.remove(plain.name)
    with pytest.raises(UnknownHandler), engine.begin() as tx:
        plans.compensate(tx, plan.id, by="assistant")


# --- reading ---------------------------------------------------------------------------------------


def test_a_page_is_newest_first_and_by_state_and_origin(shop, engine):
    kind = shop.step()
    made = [shop.propose(kind.planned(n), origin=f"o{n % 2}") for n in range(4)]
    shop_ids = [plan.id for plan in reversed(made)]
    with engine.begin() as tx:
        plans.reject(tx, made[0].id, by="dana")
        assert [plan.id for plan in plans.list(tx)] == shop_ids
        assert [plan.id for plan in plans.list(tx, limit=2, after=shop_ids[0])] == shop_ids[1:3]
        assert [plan.id for plan in plans.list(tx, state="rejected")] == [made[0].id]
        assert [plan.id for plan in plans.list(tx, origin="o1")] == [made[3].id, made[1].id]
        assert plans.previous(tx, made[3].id).id == made[1].id
        assert plans.previous(tx, made[1].id) is None
        with pytest.raises(InvalidOption):
            plans.list(tx, state="done")


def test_a_read_only_look_heals_nothing_and_does_not_fail(shop, engine, clock):
    plan = shop.propose(shop.step().planned(1), expires=60)
    clock.advance(61)
    with engine.begin() as tx:
        tx.execute(text("set transaction read only"))
        assert plans.get(tx, plan.id).state == "pending"
    assert shop.get(plan.id).state == "expired"


@pytest.fixture
def reader(engine, worker_id):
    """A role that may read our tables and nothing more."""
    role = f"plan_reader_{worker_id}"
    with engine.begin() as tx:
        tx.execute(text(f"drop role if exists {role}"))
        tx.execute(text(f"create role {role}"))
        tx.execute(text(f"grant usage on schema durable to {role}"))
        tx.execute(text(f"grant select on all tables in schema durable to {role}"))
    yield role
    with engine.begin() as tx:
        tx.execute(text(f"drop owned by {role}"))
        tx.execute(text(f"drop role {role}"))


def test_a_role_that_may_only_read_reads_a_plan_whose_time_is_over_and_the_sweep_heals_it(
    shop, engine, database, clock, reader
):
    waiting = shop.propose(shop.step().planned(1), origin="o")
    claimed = shop.approved(shop.step().planned(1), origin="o")
    shop.claim(claimed)
    clock.advance(16 * MINUTE)
    with engine.begin() as tx:
        tx.execute(text(f"set local role {reader}"))
        assert plans.get(tx, waiting.id).state == "pending"
        assert plans.report(tx, claimed.id).state == "executing"
        assert plans.previous(tx, claimed.id).state == "pending"
    assert (sweep.expire(database), sweep.reap(database)) == (1, 1)
    assert [shop.raw(plan.id).state for plan in (waiting, claimed)] == ["expired", "failed"]


def test_a_read_that_the_database_refuses_for_another_reason_says_so_and_its_transaction_lives(shop, engine, clock):
    """A trigger of the host's: what it raises is not for us to hide."""
    plan = shop.propose(shop.step().planned(1))
    clock.advance(16 * MINUTE)
    with engine.begin() as tx:
        tx.execute(
            text(
                "create function public.says_no() returns trigger language plpgsql as "
                "$$begin raise exception 'no' using errcode = 'P0001'; end$$"
            )
        )
        tx.execute(
            text("create trigger says_no before update on durable.plans for each row execute function public.says_no()")
        )
    try:
        with engine.begin() as tx:
            with pytest.raises(DBAPIError, match="no"):
                plans.get(tx, plan.id)
            assert tx.scalar(text("select 1")) == 1
    finally:
        with engine.begin() as tx:
            tx.execute(text("drop function public.says_no cascade"))


def test_somebody_at_work_on_the_row_is_no_wait(shop, engine, other_engine):
    plan = shop.propose(shop.step().planned(1))
    with other_engine.begin() as other:
        other.execute(text("select from durable.plans where id = :id for no key update"), {"id": plan.id})
        with engine.begin() as tx:
            with pytest.raises(RowBusy):
                plans.approve(tx, plan.id, by="dana", digest=plan.digest)
            with pytest.raises(RowBusy):
                plans.reject(tx, plan.id, by="dana")
            assert tx.scalar(text("select 1")) == 1


def shop_kind(plan):
    return kinds.plan_steps.get(plan.steps[0].kind)
