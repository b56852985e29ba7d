"""The words of operations: what statuses come to, and what a declaration may say."""

import pytest

from durable_core import ExternalStatus, Issued, OperationStep, Poll, kinds, operation
from durable_core.errors import DefinitionError
from durable_core.operations.declare import is_on
from durable_core.operations.statuses import checked_words, read, verdict

OURS = checked_words("k", None)


def kept(**statuses):
    return {one: {"status": status, "word": status} for one, status in statuses.items()}


@pytest.mark.parametrize(
    ("statuses", "state", "heard", "code"),
    [
        ({}, "failed", True, "NO_OPERATIONS"),
        ({"a": "ok"}, "succeeded", True, None),
        ({"a": "ok", "b": "running"}, "running", True, None),
        ({"a": "ok", "b": "unknown"}, "running", False, None),
        ({"a": "unknown"}, "running", False, None),
        ({"a": "ok", "b": "failed"}, "failed", True, "REMOTE_FAILED"),
        ({"a": "running", "b": "failed"}, "failed", True, "REMOTE_FAILED"),
        ({"a": "canceled", "b": "failed"}, "failed", True, "REMOTE_FAILED"),
        ({"a": "canceled", "b": "unknown"}, "failed", True, "REMOTE_CANCELED"),
    ],
)
def test_what_a_set_of_statuses_comes_to(statuses, state, heard, code):
    found = verdict(kept(**statuses))
    assert (found.state, found.code) == (state, code)
    assert found.heard is heard


def test_words_are_translated_by_the_kind_alone():
    words = checked_words("k", {"done": "ok", "error": "failed"})
    found = read(words, ["a", "b", "c", "d"], {"a": "done", "b": "DONE", "c": "ok", "d": ExternalStatus.OK}, {})
    assert [one["status"] for one in found.values()] == ["ok", "unknown", "unknown", "ok"]
    assert found["b"]["word"] == "DONE"


@pytest.mark.parametrize("said", [None, 7, ["ok"], True])
def test_what_is_no_word_is_unknown(said):
    assert read(OURS, ["a"], {"a": said}, {})["a"]["status"] == "unknown"


@pytest.mark.parametrize("end", ["ok", "failed", "canceled"])
@pytest.mark.parametrize("later", ["running", "unknown", "ok", "failed"])
def test_what_ended_stays_as_it_ended(end, later):
    assert read(OURS, ["a"], {"a": later}, kept(a=end))["a"]["status"] == end


@pytest.mark.parametrize("statuses", [{}, {"done": "fine"}, {1: "ok"}, ["ok"]])
def test_a_translation_that_says_nothing_is_refused(statuses):
    with pytest.raises(DefinitionError, match="statuses"):
        checked_words("k", statuses)


@pytest.mark.parametrize(
    "terms",
    [{"lease": 0}, {"every": -1}, {"timeout": "5"}, {"one_in_flight": 1}, {"queue": "control"}, {"priority": 10},
     {"start_within": float("inf")}],
)  # fmt: skip
def test_a_declaration_that_cannot_work_is_refused(terms):
    with pytest.raises(DefinitionError):
        operation("unit.wrong", **terms)(lambda step: None)
    assert "unit.wrong" not in kinds.operations


@pytest.mark.parametrize("name", ["by", "trigger", "auto"])
def test_an_argument_may_not_be_called_as_one_of_start(name):
    scope: dict = {}
    exec(f"def handler(step, {name}): ...", scope)
    with pytest.raises(DefinitionError, match=name):
        operation("unit.wrong")(scope["handler"])


def test_a_hook_is_given_once_and_where_the_callers_transaction_is_open_it_is_plain():
    kind = operation("unit.hooks")(lambda step: None)
    try:
        with pytest.raises(DefinitionError, match="poll"):
            kind.check()
        kind.poll(lambda step, ids: {})
        kind.check()
        with pytest.raises(DefinitionError, match="once"):
            kind.poll(lambda step, ids: {})

        async def configured():
            return True

        with pytest.raises(DefinitionError, match="async"):
            kind.configured(configured)
        assert OperationStep(kind, "0198", "{}").key == "unit.hooks:0198"
    finally:
        kinds.operations.remove("unit.hooks")


@pytest.mark.parametrize("flag", [None, "", "false", "TRUE", "True", "yes", "1", 1, False, "true "])
def test_a_flag_is_on_for_the_exact_value_alone(flag):
    assert is_on(True)
    assert is_on("true")
    assert not is_on(flag)


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), True, "5"])
def test_a_wait_that_is_no_duration_is_refused_where_it_is_made(wait):
    for make in (lambda: Poll({}, retry_after=wait), lambda: Issued(["a"], retry_after=wait)):
        with pytest.raises(ValueError, match="give seconds"):
            make()
