"""A database that takes the connection and then says nothing ends a look with a sentence, wherever it falls silent."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from sqlalchemy import Engine, create_engine

from durable_core.cli import database as room
from durable_core.cli.exits import CommandError, NoAnswer
from durable_core.database.connections import Database
from durable_core.testing import Made
from tests.cli.conftest import error_of, process
from tests.relay import Relay

Run = Callable[..., Result]

SILENT_AT = [
    (b"pg_catalog.version", ("status",)),  # what SQLAlchemy asks of a new server
    (b"transaction_read_only", ("status",)),  # what we ask first
    *((b"durable_now", look) for look in (("status",), ("why", "a-key"), ("deliveries", "list"), ("errors", "list"))),
]

NOTICED_SECONDS = 3 * (1 + 1)
"""The bound of these tests, and the second in which it is noticed; three times that."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ANSWER_SECONDS", 1.0)


@pytest.fixture
def relay(engine: Engine) -> Iterator[Relay]:
    relay = Relay(str(engine.url.host), int(engine.url.port or 5432))
    yield relay
    relay.close()


def in_time(act: Callable[[], object]) -> None:
    """Run it aside, and fail if it is not over within the bound: what hangs must not hang the tests."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(NOTICED_SECONDS)
    assert not thread.is_alive(), "it waits for ever"


@pytest.mark.parametrize(
    ("words", "look"), SILENT_AT, ids=lambda one: one.decode() if isinstance(one, bytes) else " ".join(one)
)
def test_a_look_at_a_server_that_falls_silent_ends_with_a_sentence(
    run: Run, engine: Engine, make: Callable[..., Made], relay: Relay, words: bytes, look: tuple[str, ...]
) -> None:
    make(key="a-key")
    url = engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    cut = relay.silence_before(words)
    results: list[Result] = []
    in_time(lambda: results.append(run("--database-url", url, *look, "--json")))

    assert cut.done
    (result,) = results
    assert (result.exit_code, error_of(result)) == (1, "NO_ANSWER")
    assert result.stderr.startswith("durable: the database takes connections and has not answered for 1 s")
    assert "Nothing was changed" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_nothing_but_the_sentence_is_said(engine: Engine, relay: Relay) -> None:
    """In a process of its own, with the bound that it has: no handler of pytest's is there to take what is logged."""
    url = engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    relay.silence_before(b"durable_now")
    done = process("--database-url", url, "status")
    assert (done.returncode, done.stdout) == (1, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("durable: the database takes connections and has not answered for 10 s")


def test_an_app_whose_engine_has_no_bound_of_its_own_is_not_waited_for(engine: Engine) -> None:
    """As a server that is stopped: the kernel takes the connection, and nobody greets it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        hosts = create_engine(engine.url.set(host="127.0.0.1", port=mute.getsockname()[1]))
        raised: list[Exception] = []

        def looks() -> None:
            try:
                with room.reading(Database(hosts)):
                    raise AssertionError("nobody let us in")
            except CommandError as error:
                raised.append(error)

        in_time(looks)
    assert [type(error) for error in raised] == [NoAnswer]


def test_a_connection_that_is_lost_at_once_is_not_called_silence(run: Run, engine: Engine, relay: Relay) -> None:
    url = engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    relay.cut_before(b"transaction_read_only")
    result = run("--database-url", url, "status", "--json")
    assert (result.exit_code, error_of(result)) == (1, "DATABASE_UNREACHABLE")
