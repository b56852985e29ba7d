"""`durable plans`, and what `find`, `journal` and `status` say of plans."""

import pytest
from sqlalchemy import text

from tests.cli.conftest import error_of, value_of
from tests.core.plan_shop import product_of, rename

EVIL = "fine\u202egnihton\u200b" + "\n" * 50 + "2. product.delete"


@pytest.fixture
def made(shop):
    """A pending plan of two steps, whose texts try to hide the second."""
    kind, plain = shop.step(rename, scope="catalog:write"), shop.step()
    return shop.propose(
        kind.planned(7, name="Oak\u202e\x1b[2J", target=shop.product(), rationale=EVIL),
        plain.planned(2, label="Note it"),
        scopes={"catalog:write"}, origin="chat 1", rationale=EVIL, risk="high",
    )  # fmt: skip


def test_a_plan_is_shown_whole_and_no_text_of_its_steers_the_terminal_or_hides_a_step(durable, made):
    shown = durable("plans", "show", made.id)
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "2 steps:"
    assert lines[1] == f"1. {made.steps[0].kind}"
    assert '"name": "Oak\\u202e\\u001b[2J"' in lines[2]
    assert lines[3].strip() == "target: product 7 at version 3; nothing ties it to the arguments, so compare them"
    assert lines[5] == f"2. {made.steps[1].kind}"
    assert lines[7].strip() == "target: none was reviewed, so none is compared"
    assert "its proposer calls it: Note it" in lines[8]
    for dangerous in ("\u202e", "\u200b", "\x1b"):
        assert dangerous not in shown.output
    assert "\\u202e" in shown.stdout
    assert made.digest in shown.stdout
    assert "catalog:write" in shown.stdout
    assert "--digest " + made.digest[:12] in shown.stderr
    value = value_of(durable("plans", "show", made.id, "--json"))
    assert value["steps"][0]["arguments"] == {"product_id": 7, "name": "Oak\u202e\x1b[2J"}
    assert value["rationale"] == EVIL
    assert [line["move"] for line in value["journal"]] == ["propose"]


def test_secrets_are_masked_for_people_and_programs(durable, shop):
    plan = shop.propose(shop.step(takes_names).planned({"api_key": "hunter2-hunter2", "name": "x"}))
    for line in (("plans", "show", plan.id), ("plans", "show", plan.id, "--json")):
        assert "hunter2" not in durable(*line).output


def takes_names(step, names: dict): ...


def test_the_digest_is_needed_and_a_beginning_of_it_will_do(durable, shop, made):
    by = ("--by", "dana")
    assert durable("plans", "approve", made.id, *by).exit_code == 2
    assert durable("plans", "approve", made.id, *by, "--digest", made.digest[:11]).exit_code == 2
    other = "0" * 12 if made.digest[0] != "0" else "1" * 12
    stale = durable("plans", "approve", made.id, *by, "--digest", other, "--json")
    assert (stale.exit_code, error_of(stale)) == (5, "STALE_PLAN")
    own = durable("plans", "approve", made.id, "--by", "assistant", "--digest", made.digest, "--json")
    assert (own.exit_code, error_of(own)) == (5, "SELF_APPROVAL")
    assert shop.raw(made.id).state == "pending"
    done = durable("plans", "approve", made.id[:13], *by, "--digest", made.digest[:12].upper(), "--json")
    assert value_of(done) == {"id": made.id, "outcome": "approved"}
    assert (shop.raw(made.id).state, shop.raw(made.id).approved_by) == ("approved", "dana")
    again = durable("plans", "approve", made.id, *by, "--digest", made.digest, "--json")
    assert (again.exit_code, error_of(again)) == (5, "ILLEGAL_MOVE")


def test_an_expired_plan_is_not_approved_and_is_said_to_have_expired(durable, shop, made, clock):
    clock.advance(901)
    late = durable("plans", "approve", made.id, "--by", "dana", "--digest", made.digest, "--json")
    assert (late.exit_code, error_of(late)) == (5, "PLAN_EXPIRED")
    assert "ago" in durable("plans", "list").stdout


def test_a_plan_is_rejected_with_who_and_why(durable, shop, made):
    assert durable("plans", "reject", made.id, "--by", "dana", "--reason", "not today").exit_code == 0
    shown = durable("plans", "show", made.id).stdout
    assert "by dana: not today" in shown
    report = durable("plans", "report", made.id).stdout
    assert report.startswith(f"plan {made.id} was rejected: 0 of 2 steps done")


def test_a_page_has_no_payload(durable, shop, made):
    plain = durable("plans", "list", "--state", "pending", "--origin", "chat 1")
    assert made.id in plain.stdout
    listed = value_of(durable("plans", "list", "--json"))
    assert [one["id"] for one in listed["plans"]] == [made.id]
    assert "arguments" not in listed["plans"][0]["steps"][0]
    assert "Oak" not in plain.output
    assert value_of(durable("plans", "list", "--state", "executed", "--json"))["plans"] == []
    assert "there may be more" in durable("plans", "list", "--limit", "1").stderr


def test_what_changed_since_the_proposal_before_is_shown(durable, shop, made):
    kind = shop.step()
    assert "no other proposal" in durable("plans", "show", made.id, "--diff").stdout
    second = shop.propose(kind.planned(3), origin="chat 1", risk="high", scopes={"catalog:write"})
    shown = durable("plans", "show", second.id, "--diff").stdout
    assert f"--- {made.id}" in shown
    assert f"+step {kind.name}" in shown
    assert f"-step {made.steps[0].kind}" in shown
    assert "\u202e" not in shown
    third = shop.propose(kind.planned(3), origin="chat 1", risk="high", scopes={"catalog:write"})
    assert f"are those of {second.id}" in durable("plans", "show", third.id, "--diff").stdout


def test_a_step_more_at_the_top_is_the_one_difference_and_a_changed_line_is_seen_with_its_step(durable, shop):
    kind, plain = shop.step(rename, target=product_of), shop.step()
    shop.product()
    how = {"origin": "chat 1", "self_approval": False}
    step = kind.planned(7, name="Oak", version=3, label="Rename it", rationale="it is an oak")
    shop.propose(step, plain.planned(2), **how)
    more = shop.propose(plain.planned(1), step, plain.planned(2), **how)
    diff = value_of(durable("plans", "show", more.id, "--json"))["diff"]
    changed = [line for line in diff[2:] if line[0] in "+-"]
    assert changed[0] == f"+step {plain.name}"
    assert all(line[0] == "+" for line in changed)
    assert len(changed) == 3
    reworded = kind.planned(7, name="Oak", version=3, label="Rename it", rationale="it is no ash")
    last = shop.propose(plain.planned(1), reworded, plain.planned(2), origin="chat 1", self_approval=True)
    diff = value_of(durable("plans", "show", last.id, "--json"))["diff"]
    assert "-approval: by somebody else than its proposer" in diff
    assert "+approval: its proposer may approve it" in diff
    assert f" step {kind.name}" in diff[: diff.index("-     and says why: it is an oak")]
    shown = durable("plans", "show", last.id).stdout
    assert "target: product 7 at version 3\n" in shown


def test_the_report_says_what_became_of_each_step_and_outputs_when_asked(durable, shop, worker):
    kind, bad = shop.step(), shop.step(lambda step: 1 / 0)
    plan = shop.approved(kind.planned(41, label="Count"), bad.planned(), kind.planned(3))
    shop.run(worker, plan, 2)
    said = durable("plans", "report", plan.id).stdout
    assert "1. Count: done" in said
    assert f"2. {bad.name}: failed (WORKER_ERROR: ZeroDivisionError: division by zero)" in said
    assert f"3. {kind.name}: not run" in said
    assert "returned" not in said
    assert "1. returned 41" in durable("plans", "report", plan.id, "--output").stdout
    told = value_of(durable("plans", "report", plan.id, "--json"))
    assert [line["became"] for line in told["lines"]] == ["done", "failed", "not run"]
    assert "output" not in told["lines"][0]
    assert value_of(durable("plans", "report", plan.id, "--json", "--output"))["lines"][0]["output"] == 41
    assert "[failed]" in durable("plans", "show", plan.id).stdout


def test_a_compensation_is_proposed_and_what_has_none_is_listed(durable, shop, worker):
    kind, plain = shop.step(), shop.step()
    kind.compensation(lambda arguments, output: kind.planned(-output))
    plan = shop.approved(kind.planned(1), plain.planned(2))
    early = durable("plans", "compensate", plan.id, "--by", "dana", "--json")
    assert (early.exit_code, error_of(early)) == (5, "ILLEGAL_MOVE")
    shop.run(worker, plan, 2)
    made = value_of(durable("plans", "compensate", plan.id, "--by", "dana", "--expires", "2h", "--json"))
    assert made["proposed"]["steps"][0]["arguments"] == {"n": -1}
    assert made["not_compensated"] == [{"step": 1, "kind": plain.name, "label": None}]
    assert made["proposed"]["compensates"] == plan.id
    again = durable("plans", "compensate", plan.id, "--by", "dana")
    assert again.exit_code == 5
    alone = shop.approved(plain.planned(2))
    shop.run(worker, alone)
    assert "nothing is proposed" in durable("plans", "compensate", alone.id, "--by", "dana").stdout


def test_a_held_plan_is_released(durable, shop, engine, made):
    with engine.begin() as tx:
        tx.execute(text("update durable.plans set held_reason = 'a trigger of yours' where id = :id"), {"id": made.id})
    assert "a trigger of yours" in durable("plans", "show", made.id).stdout
    refused = durable("plans", "approve", made.id, "--by", "dana", "--digest", made.digest, "--json")
    assert (refused.exit_code, error_of(refused)) == (5, "ILLEGAL_MOVE")
    assert durable("plans", "release", made.id, "--by", "dana", "--reason", "mended").exit_code == 0
    assert shop.raw(made.id).held_reason is None
    assert durable("plans", "release", made.id, "--by", "dana", "--reason", "mended").exit_code == 5


def test_find_and_journal_know_a_plan_by_every_name_of_it(durable, shop, made, kind, engine):
    for name, by in (
        (made.id, "id"), (made.id[:10], "beginning of an id"), (f"{made.id}:1", "step.key"), ("chat 1", "origin"),
    ):  # fmt: skip
        (found,) = value_of(durable("find", name, "--json"))["found"]
        assert (found["what"], found["id"], found["by"]) == ("plan", made.id, by)
        assert found["look"] == f"durable plans show {made.id}"
    assert "propose" in durable("journal", made.id).stdout
    with engine.begin() as tx:
        ref = kind.enqueue(tx)
    wrong = durable("plans", "show", ref.id, "--json")
    assert (wrong.exit_code, error_of(wrong)) == (4, "NOT_FOUND")
    assert durable("plans", "show", "0198a4c4-0000-7000-8000-000000000000").exit_code == 4


def test_status_says_how_many_plans_wait_for_a_person_and_since_when(durable, shop, made, clock):
    clock.advance(120)
    shop.propose(shop.step().planned(1))
    assert "plans that wait for a person 2, the oldest for 2m" in durable("status").stdout
    told = value_of(durable("status", "--json"))["plans"]
    assert (told["pending"], told["executing"]) == (2, 0)
    assert told["oldest_pending_at"] is not None
