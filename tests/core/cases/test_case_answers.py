"""What a request is told that was executed before: the same as the first time, but for what was erased since."""

from dataclasses import replace

from uuid_utils import uuid7

from durable_core.cases.request import Request


def declared(world):
    kind = world.type()
    kind.step("end")(lambda state, ctx: ctx.end() or state)
    kind.step("reopen")(lambda state, ctx: ctx.reopen() or state)
    kind.step("go")(lambda state, ctx: {"n": state["n"] + 1})
    return world.cases(kind)


def requested(cases, case_id, step):
    request = Request(case_id=case_id, step=step, request_id=str(uuid7()), lease=cases.leased(None, None))
    return request, cases.lifecycle.execute(request)


def test_an_answer_says_since_when_the_case_was_dormant_then(world):
    cases = declared(world)
    case_id = world.create(cases, {"n": 0})
    made = []
    for step in ("go", "end", "go", "end", "reopen", "go", "end"):
        made.append(requested(cases, case_id, step))
        world.clock.advance(1)
    dormant = [done.ended_at for _, done in made]
    assert dormant == [None, made[1][1].committed_at, dormant[1], dormant[1], None, None, made[6][1].committed_at]
    for request, done in made:
        answer = cases.lifecycle.execute(request)
        assert answer.answered
        assert replace(answer, answered=False) == done


def test_an_answer_whose_change_was_erased_does_not_say_that_nothing_was_changed(world):
    cases = declared(world)
    case_id = world.create(cases, {"n": 0})
    request, done = requested(cases, case_id, "go")
    assert len(done.delta) == 1
    with world.begin() as tx:
        cases.erase(tx, case_id, by="dana")
    answer = cases.lifecycle.execute(request)
    assert (answer.delta, answer.state, answer.guard, answer.seq) == (None, None, None, 1)
