"""A handler that executes steps itself: what became of those is told apart from what becomes of its own execution."""

import pytest

from durable_core.cases.declare import Attempts
from durable_core.database.commits import CommitUnknown
from durable_core.errors import EffectEscaped
from durable_core.refusals import CaseClaimLost, ExecutionFailed, InvalidState

FOREIGN = [
    CaseClaimLost("another", "its execution", None),
    CommitUnknown("of another"),
    InvalidState("another", ()),
    EffectEscaped("another", "case"),
]


def name(error):
    return type(error).__name__


@pytest.mark.parametrize("error", FOREIGN, ids=name)
@pytest.mark.parametrize("where", ["handler", "write"])
def test_what_a_nested_execution_raises_is_a_failed_attempt_like_any(world, error, where):
    kind, raised = world.type(), []

    def once(_=None):
        raised.append(1)
        if len(raised) == 1:
            raise error

    @kind.step("go", retry=Attempts(2, 0))
    def go(state, ctx):
        once() if where == "handler" else ctx.in_commit(once)
        return {"done": True}

    cases = world.cases(kind)
    case_id = world.create(cases, {})
    assert cases.execute(case_id, "go").attempts == 2
    assert world.kinds(cases, case_id) == [("claimed", 1), ("attempt-failed", 1), ("completed", 2)]


@pytest.mark.parametrize("error", FOREIGN, ids=name)
@pytest.mark.parametrize("where", ["handler", "write"])
def test_the_last_of_them_gives_the_case_free_and_names_its_own_case(world, error, where):
    kind = world.type()

    def raises(_=None):
        raise error

    @kind.step("go", retry=Attempts(1, 0))
    def go(state, ctx):
        raises() if where == "handler" else ctx.in_commit(raises)
        return {"done": True}

    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "go")
    assert failed.value.__cause__ is error
    assert case_id in str(failed.value)
    assert world.kinds(cases, case_id) == [("claimed", 1), ("failed", 1)]
    assert world.get(cases, case_id).claim is None


def test_an_owner_that_was_overtaken_is_told_so_also_where_its_last_attempt_raises(world, monkeypatch):
    kind = world.type()
    kind.step("other")(lambda state, ctx: {"by": "other"})
    cases = world.cases(kind)
    monkeypatch.setattr(cases.lifecycle.store, "keep", lambda *_: False)

    @kind.step("slow", retry=Attempts(1, 0))
    def slow(state, ctx):
        world.clock.advance(31)
        cases.execute(case_id, "other")
        raise ValueError("too late")

    case_id = world.create(cases, {})
    with pytest.raises(CaseClaimLost) as lost:
        cases.execute(case_id, "slow")
    assert isinstance(lost.value.__cause__, ValueError)
    last = world.journal(cases, case_id)[-1]
    assert (str(last.entry), last.step, last.error["name"]) == ("failed", "slow", "ValueError")
    assert world.get(cases, case_id).state == {"by": "other"}
