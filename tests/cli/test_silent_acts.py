"""A database that falls silent under a command that acts: it ends in time, and says whether the outcome is known."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import Connection, Engine, text

from durable_core.deliveries import bulk
from durable_core.testing import Made
from tests.cli.conftest import error_of
from tests.cli.test_silent import impatient, in_time, relay  # noqa: F401  (fixtures)
from tests.core.plan_shop import Shop
from tests.relay import COMMIT, Relay

Run = Callable[..., Result]
WHO = ("--by", "dana", "--reason", "test", "--yes", "--json")
SILENT, UNKNOWN = "has not answered for 1 s", "Whether it was done is not known"


@pytest.fixture
def acts(
    make: Callable[..., Made], reset: object, start: Callable[..., object], shop: Shop
) -> Callable[[str], tuple[str, ...]]:
    """The command line of an act on a row made for it."""
    numbers = itertools.count()

    def line(act: str) -> tuple[str, ...]:
        match act:
            case "delivery":
                return "deliveries", "cancel", make(key=f"k{next(numbers)}").id, *WHO
            case "deliveries":
                make(key=f"k{next(numbers)}")
                return "deliveries", "cancel", "--state", "pending", *WHO
            case "operation":
                return "operations", "cancel", start(reset).id, *WHO  # type: ignore[attr-defined]
            case _:
                plan = shop.propose(shop.step().planned(1))
                return "plans", "approve", plan.id, "--digest", plan.digest, "--by", "dana", "--json"

    return line


def states(engine: Engine) -> set[str]:
    with engine.connect() as tx:
        return {
            state
            for table in ("deliveries", "operations", "plans")
            for state in tx.scalars(text(f"select state from durable.{table}"))
        }


ACTS = ("delivery", "deliveries", "operation", "plan")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("at", ["greeting", "act", "commit", "answer"])
def test_an_act_at_a_server_that_falls_silent_ends_in_time_and_says_whether_its_outcome_is_known(
    run: Run, engine: Engine, acts: Callable[[str], tuple[str, ...]], relay: Relay, act: str, at: str  # noqa: F811
) -> None:  # fmt: skip
    line = acts(act)
    before = states(engine)
    words = {"greeting": b"pg_catalog.version", "act": b"acted as ("}.get(at, COMMIT)
    if at != "greeting" and act == "deliveries":
        # By a filter each statement is bounded by itself, and its looks are transactions of their own.
        words = b"acted as ("
    cut = relay.silence_after(words) if at == "answer" else relay.silence_before(words)
    url = engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    results: list[Result] = []
    in_time(lambda: results.append(run("--database-url", url, *line)))

    assert cut.done
    (result,) = results
    assert (result.exit_code, error_of(result)) == (1, "NO_ANSWER")
    assert SILENT in result.stderr
    unknown = at != "greeting" if act == "deliveries" else at in ("commit", "answer")
    assert (UNKNOWN in result.stderr) is unknown
    assert ("Nothing was changed" in result.stderr) is not unknown
    assert ("`durable journal` shows it" in result.stderr) is unknown
    assert "Traceback" not in result.stderr
    if at == "answer" and act != "deliveries":
        assert states(engine) != before, "it was done, and nobody heard of it"
    else:
        assert states(engine) == before


@pytest.mark.parametrize("act", ["delivery", "operation", "plan"])
def test_an_act_whose_commit_loses_its_connection_at_once_is_not_called_undone(
    run: Run, engine: Engine, acts: Callable[[str], tuple[str, ...]], relay: Relay, act: str  # noqa: F811
) -> None:  # fmt: skip
    line = acts(act)
    relay.cut_after(COMMIT)
    url = engine.url.set(host="127.0.0.1", port=relay.port).render_as_string(hide_password=False)
    result = run("--database-url", url, *line)
    assert (result.exit_code, error_of(result)) == (1, "NO_ANSWER")
    assert UNKNOWN in result.stderr
    assert "was lost" in result.stderr


@pytest.mark.parametrize("act", ["delivery", "operation"])
def test_a_dry_run_changes_nothing_and_an_act_in_time_does(
    durable: Run, engine: Engine, acts: Callable[[str], tuple[str, ...]], act: str
) -> None:
    line = acts(act)
    before = states(engine)
    assert durable(*line, "--dry-run").exit_code == 0
    assert states(engine) == before
    assert durable(*line).exit_code == 0
    assert "canceled" in states(engine)


@pytest.mark.parametrize(("act", "table"), [("delivery", "deliveries"), ("operation", "operations"), ("plan", "plans")])
def test_an_act_that_waits_for_a_locked_table_is_given_up_with_nothing_done(
    durable: Run, other_engine: Engine, engine: Engine, acts: Callable[[str], tuple[str, ...]], act: str, table: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("durable_core.cli.database.READ_SECONDS", 0.3)
    line = acts(act)
    before = states(engine)
    with other_engine.connect() as migration:
        migration.execute(text(f"lock table durable.{table} in access exclusive mode"))
        result = durable(*line)
    assert (result.exit_code, error_of(result)) == (1, "STATEMENT_TIMEOUT")
    assert states(engine) == before


def test_an_act_on_many_that_is_broken_off_says_how_many_it_has_done(
    durable: Run, engine: Engine, make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        make(key=f"k{number}")
    calls = itertools.count(1)
    real = bulk.act_on_each

    def slow_at_the_last(tx: Connection, *given: Any, **more: Any) -> Any:
        if next(calls) == 3:
            tx.execute(text("set local statement_timeout = 50"))
            tx.execute(text("select pg_sleep(5)"))
        return real(tx, *given, **more)

    monkeypatch.setattr(bulk, "BATCH", 1)
    monkeypatch.setattr(bulk, "act_on_each", slow_at_the_last)
    result = durable("deliveries", "cancel", "--state", "pending", *WHO)
    assert (result.exit_code, error_of(result)) == (1, "STATEMENT_TIMEOUT")
    assert "2 canceled before that, which stands" in result.stderr
    assert "within 5 s" not in result.stderr
    with engine.connect() as tx:
        assert sorted(tx.scalars(text("select state from durable.deliveries"))) == ["canceled", "canceled", "pending"]
