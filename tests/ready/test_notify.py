"""`notify.send` by Apprise's `json://` to a real HTTP server: what becomes of each answer."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from durable_core import DefinitionError, InvalidArguments, enqueue_by_name
from durable_core.deliveries.attempt import Attempted, Outcome, Worker, perform
from durable_core.deliveries.read import Delivery
from durable_core.errors import NotInstalled
from durable_core.ready import notify
from durable_core.ready.environment import targets_from_environment
from tests.sinks import Receiver, http_server, status

CarryOut = Callable[..., Attempted]
Declare = Callable[..., Any]
Row = Callable[[str], Delivery]


@pytest.fixture
def other() -> Iterator[Receiver]:
    with http_server() as receiver:
        yield receiver


def at(receiver: Receiver) -> str:
    """An Apprise URL with a token in it."""
    return receiver.url.replace("http://", "json://ops:hunter2@") + "/hook"


def test_importing_declares_nothing_and_loads_no_apprise() -> None:
    """In a process of its own, for others here may have declared it."""
    code = (
        "import sys; from durable_core import kinds; from durable_core.ready import notify as r;"
        "r.declare({'ops': 'json://localhost'}, name='other');"
        "print(r.KIND in kinds.deliveries, 'apprise' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_without_the_extra_a_declaration_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "is_installed", lambda: False)
    with pytest.raises(NotInstalled, match=r"durable-core\[notify\]"):
        notify.declare({"ops": "json://localhost"}, name="test.notify_uninstalled")


def test_a_notification_arrives_and_its_url_is_stored_nowhere(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver, row: Row
) -> None:
    kind = declare_notify({"ops": at(receiver)})
    done = carry_out(kind, to="ops", body="Disk füll.", title="db1", type="failure")

    assert (done.outcome, row(done.id).result) == (Outcome.SENT, {"sent": 1})
    (call,) = receiver.calls
    told = json.loads(call.body)
    assert (told["title"], told["message"], told["type"]) == ("db1", "Disk füll.", "failure")
    assert call.headers["authorization"].startswith("Basic ")
    assert "hunter2" not in json.dumps(row(done.id).as_json())


def test_a_target_that_does_not_take_it_is_tried_again(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver, row: Row
) -> None:
    receiver.answers = [status(500, b"hunter2")]
    done = carry_out(declare_notify({"ops": at(receiver)}), to="ops", body="x")
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NOTIFY_FAILED")
    message = str(row(done.id).error_message)
    assert "1 of 1 targets of 'ops' did not take it (json: " in message
    assert "hunter2" not in message


def test_when_one_of_several_fails_all_are_told_again(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver, other: Receiver, worker: Worker, clock: Any
) -> None:
    """At least once for each, so the one that has it gets it again: the documented hole."""
    receiver.answers = [status(500)]
    kind = declare_notify({"ops": [at(receiver), at(other)]})
    first = carry_out(kind, to="ops", body="x")
    clock.advance(3600)
    second = perform(worker, kind, first.id)

    assert (first.outcome, first.error_code) == (Outcome.RETRY, "NOTIFY_PARTLY")
    assert second.outcome is Outcome.SENT
    assert (len(receiver.calls), len(other.calls)) == (2, 2)


def test_a_budget_spent_while_one_target_failed_ends_dead_and_not_sent(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver, other: Receiver
) -> None:
    receiver.answers = [status(500)]
    kind = declare_notify({"ops": [at(receiver), at(other)]}, max_attempts=1)
    assert carry_out(kind, to="ops", body="x").outcome is Outcome.DEAD


def test_a_target_that_never_answers_ends_at_its_share_of_the_time(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver, other: Receiver, row: Row
) -> None:
    """Apprise's own time-outs run anew with each byte; the second target has its turn all the same."""
    over = threading.Event()

    def drip(to: Any) -> None:
        to.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not over.wait(0.05):
            to.wfile.write(b"x")

    receiver.answers = [drip]
    kind = declare_notify({"ops": [at(receiver), at(other)]}, total_timeout=2.0)
    began = time.monotonic()
    done = carry_out(kind, to="ops", body="x")
    over.set()
    assert (done.outcome, done.error_code) == (Outcome.RETRY, "NOTIFY_PARTLY")
    assert "json: no answer in time" in str(row(done.id).error_message)
    assert time.monotonic() - began < 8
    assert len(other.calls) == 1


def test_a_name_that_is_not_in_the_settings_is_refused_at_enqueue(declare_notify: Declare, engine: Engine) -> None:
    kind = declare_notify({"ops": "json://u:hunter2@localhost"})
    with engine.begin() as connection, pytest.raises(InvalidArguments, match="they have ops") as refused:
        kind.enqueue(connection, "dev", "x")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "code"), [({}, "UNKNOWN_TARGET"), ({"ops": "nonsense://x"}, "BAD_TARGET"), ({"ops": []}, "BAD_TARGET")]
)
def test_what_only_the_worker_can_tell_gives_up(
    targets: Any, code: str, declare_notify: Declare, carry_out: CarryOut
) -> None:
    done = carry_out(declare_notify(lambda: targets), to="ops", body="x")
    assert (done.outcome, done.error_code) == (Outcome.FAILED, code)


def test_one_url_that_is_none_keeps_all_from_being_told(
    declare_notify: Declare, carry_out: CarryOut, receiver: Receiver
) -> None:
    done = carry_out(declare_notify({"ops": [at(receiver), "nonsense://hunter2"]}), to="ops", body="x")
    assert (done.outcome, done.error_code) == (Outcome.FAILED, "BAD_TARGET")
    assert receiver.calls == []


def test_a_name_taken_out_of_the_settings_gives_up(declare_notify: Declare, engine: Engine, worker: Worker) -> None:
    targets = {"ops": "json://localhost"}
    kind = declare_notify(targets)
    with engine.begin() as connection:
        ref = enqueue_by_name(connection, kind.name, {"to": "ops", "body": "x"})
    targets.clear()
    assert perform(worker, kind, ref.id).error_code == "UNKNOWN_TARGET"


@pytest.mark.parametrize("targets", [{"ops": "hunter2"}, {"ops": []}, {"ops": ["json://a", "hunter2"]}])
def test_targets_that_are_no_urls_are_refused_when_they_are_declared(targets: Any) -> None:
    with pytest.raises(DefinitionError, match="'ops'") as refused:
        notify.declare(targets, name="test.notify_bad")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [{"body": " "}, {"title": "a\r\nBcc: eve@example.com"}, {"type": "loud"}, {"to": "json://u:hunter2@localhost"}],
)
def test_what_cannot_be_said_is_refused_at_enqueue(
    arguments: dict[str, Any], declare_notify: Declare, engine: Engine
) -> None:
    kind = declare_notify({"ops": "json://localhost"})
    with engine.begin() as connection, pytest.raises(InvalidArguments, match=next(iter(arguments))):
        kind.enqueue(connection, **{"to": "ops", "body": "x", **arguments})


def test_the_environment_names_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_NOTIFY_TARGETS", '{"ops": "json://a", "dev": ["json://b", "json://c"]}')
    assert targets_from_environment() == {"ops": "json://a", "dev": ["json://b", "json://c"]}
    monkeypatch.delenv("DURABLE_NOTIFY_TARGETS")
    with pytest.raises(NotInstalled, match="set DURABLE_NOTIFY_TARGETS"):
        targets_from_environment()
    monkeypatch.setenv("DURABLE_NOTIFY_TARGETS", '{"ops": 5, "hunter2": 1')
    with pytest.raises(DefinitionError, match="DURABLE_NOTIFY_TARGETS") as refused:
        targets_from_environment()
    assert "hunter2" not in str(refused.value)
