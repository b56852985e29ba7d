"""Declaring kinds: what cannot work is refused when it is declared."""

import copy

import pytest

from durable_core import DefinitionError, DurableError, UnknownHandler, delivery
from durable_core.celery_binding.publish import QUEUE_PREFIX
from durable_core.deliveries.declare import registry
from durable_core.deliveries.options import SWEEPS_QUEUE
from durable_core.errors import NotATask
from durable_core.sweeps import CONTROL_QUEUE


def handler(step, n: int = 0):
    """What it does."""
    return n


def test_a_kind_is_declared_once(declare):
    kind = declare(handler)
    with pytest.raises(DefinitionError, match="declared twice"):
        delivery(kind.name)(handler)


@pytest.mark.parametrize("method", ["delay", "apply_async", "delay_on_commit", "s"])
def test_who_sends_a_kind_as_a_celery_task_is_told_what_to_write(declare, method):
    kind = declare(handler)
    for sent in (kind, kind.options(key="a-customers-name", countdown=5)):
        with pytest.raises(NotATask) as refused:
            getattr(sent, method)(7)
        assert (refused.value.reason, refused.value.kind, refused.value.method) == ("NOT_A_TASK", kind.name, method)
        assert str(refused.value).startswith(f"{kind.name}: a kind is no Celery task and has no {method}(): write ")
        assert ".enqueue(tx, ...)" in str(refused.value)
        assert "a-customers-name" not in str(refused.value)
        assert not hasattr(sent, method), "who looks whether it is a task is told that it is none"


def test_another_name_that_a_kind_does_not_have_is_what_it_always_was(declare):
    for sent in (declare(handler), declare(handler).options(countdown=5)):
        with pytest.raises(AttributeError, match="has no attribute 'enqeue'") as unknown:
            sent.enqeue  # noqa: B018
        assert not isinstance(unknown.value, DurableError)
        assert copy.copy(sent).enqueue


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("", {}), ("durable.mine", {}), ("a b", {}), ("a", {"queue": ""}), ("a", {"queue": "a b"}),
        ("a", {"queue": "control"}),
        ("a", {"max_attempts": 0}), ("a", {"max_interruptions": -1}), ("a", {"timeout": 0}), ("a", {"timeout": -1}),
        ("a", {"timeout": float("nan")}), ("a", {"timeout": 10**9}), ("a", {"priority": 10}), ("a", {"priority": -1}),
    ],
)  # fmt: skip
def test_a_kind_that_cannot_work_is_refused_and_not_registered(name, terms):
    with pytest.raises(DefinitionError):
        delivery(name, **terms)(handler)
    assert name not in registry


def test_the_queue_that_is_refused_is_the_one_of_the_sweeps():
    assert QUEUE_PREFIX + SWEEPS_QUEUE == CONTROL_QUEUE
    with pytest.raises(DefinitionError, match="'control' is the sweeps' own"):
        delivery("a", queue="control")(handler)


def test_a_name_may_start_with_what_the_refusal_says(declare):
    assert declare(handler, name="_a").name == "_a"
    with pytest.raises(DefinitionError, match="starting with a letter or '_'"):
        delivery("1a")(handler)


def test_a_declared_kind_keeps_the_handlers_words_and_behaviour(declare):
    kind = declare(handler)
    assert kind.__doc__ == "What it does."
    assert kind.__name__ == "handler"
    assert kind(None, 5) == 5
    assert kind.name in repr(kind)


def test_an_unknown_kind_is_named():
    with pytest.raises(UnknownHandler, match=r"nobody\.knows"):
        registry.get("nobody.knows")
    assert registry.find("nobody.knows") is None
