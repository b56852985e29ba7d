"""What holds for every command: help, version, JSON, and an error that nobody foresaw."""

from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import Result

from durable_core.cli import demo as demo_room
from durable_core.cli.main import main
from tests.cli.conftest import error_of, value_of


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
        else:
            found.append(((*path, name), command))
    return found


EVERY = commands(main)


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(path) for path, _ in EVERY])
def test_every_command_has_json_and_says_what_it_and_its_options_do(
    run: Callable[..., Result], path: tuple[str, ...], command: click.Command
) -> None:
    assert any("--json" in parameter.opts for parameter in command.params)
    assert command.get_short_help_str()
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    assert run(*path, "--help").exit_code == 0


def test_the_exit_codes_are_in_the_help(run: Callable[..., Result]) -> None:
    assert "5 conflict or wrong state" in run("--help").stdout


def test_version_names_what_it_runs_on(run: Callable[..., Result]) -> None:
    seen = value_of(run("version", "--json"))
    assert seen["durable_core"] == "0.1.0"
    assert seen["schema"]
    assert run("version").stdout.startswith("durable_core")


def test_an_unforeseen_error_is_reported_with_its_traceback_and_as_json(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> str:
        raise ZeroDivisionError("at postgresql://a:topsecret@db/x")

    monkeypatch.setattr("durable_core.database.migrate.sql", breaks)
    result = run("migrate", "--sql", "--json")
    assert (result.exit_code, error_of(result)) == (1, "UNFORESEEN")
    assert "Traceback" in result.stderr
    assert "topsecret" not in result.stdout + result.stderr


def test_ctrl_c_is_130(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("durable_core.database.migrate.sql", interrupted)
    assert run("migrate", "--sql").exit_code == 130


def test_the_demo_gets_what_was_asked_and_its_exit_code_is_ours(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    from durable_core.demo import run as play

    asked: dict[str, Any] = {}

    def played(**given: Any) -> int:
        asked.update(given)
        return 1

    monkeypatch.setattr(play, "main", played)
    assert run("demo", "--orders", "7", "--seed", "3", "--json").exit_code == 1
    assert (asked["orders"], asked["seed"], asked["as_json"], asked["directory"]) == (7, 3, True, None)
    assert run("demo", "--orders", "0").exit_code == 2


def test_the_demos_defaults_are_those_of_its_room() -> None:
    from durable_core.demo import run as play

    defaults = {parameter.name: parameter.default for parameter in demo_room.demo.params}
    wanted = {"orders": play.ORDERS, "kills": play.KILLS, "freezes": play.FREEZES, "flushes": play.FLUSHES}
    assert {name: defaults[name] for name in wanted} == wanted
