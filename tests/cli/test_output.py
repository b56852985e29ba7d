import json
import os
import pty
import subprocess
from datetime import datetime, timedelta, timezone

import click
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine

from durable_core.cli import output
from durable_core.cli.output import Output, instant, masked, plain, safe, span
from tests.cli.conftest import DURABLE, process


@pytest.fixture
def database_url(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://app:s3cret@db/x", "postgresql://app:***@db/x"),
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("tried postgresql+psycopg://a:p@ss@db and gave up", "tried postgresql+psycopg://a:***@db and gave up"),
        ("host=db password=s3cret user=a", "host=db password=*** user=a"),
        ("https://example.com/a@b", "https://example.com/a@b"),
    ],
)
def test_a_password_in_an_address_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_a_password_that_was_named_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_secrets", set())
    output.keep_secret("correct horse")
    output.keep_secret("db")  # too short: every other word would vanish
    assert plain({"error": ["the correct horse failed on db"]}) == {"error": ["the *** failed on db"]}


def test_what_a_row_holds_cannot_steer_the_terminal() -> None:
    assert safe("a\x1b[2Jb\nc\td") == "a\\x1b[2Jb ⏎ c\\td"


def test_times_for_programs_are_utc() -> None:
    paris = datetime(2026, 1, 2, 1, 30, tzinfo=timezone(timedelta(hours=2)))
    assert instant(paris) == "2026-01-01T23:30:00Z"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (-3, "0s"), (59, "59s"), (200, "3m 20s"), (3600, "1h"), (190000, "2d 4h")]
)
def test_a_duration_for_people_has_two_units(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_a_table_in_a_pipe_is_plain_aligned_and_uncut() -> None:
    long = "k" * 300

    @click.command()
    def show() -> None:
        Output(False).table(("KEY", "COUNT"), [(long, 7), ("[bold]", 10000), (None, "10000+")])

    lines = CliRunner().invoke(show).stdout.splitlines()
    assert lines == [
        "KEY" + " " * 297 + "   COUNT",
        long + "       7",
        "[bold]" + " " * 294 + "   10000",
        "-" + " " * 299 + "  10000+",
    ]


def on_a_terminal(*line: str, **env: str) -> tuple[int, str]:
    """The command on a terminal of its own: its exit code, and what a person would see."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*DURABLE, *line], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", **env}
    ) as child:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
    os.close(ours)
    return child.returncode, seen.decode()


def test_a_terminal_gets_drawn_tables_and_no_color_is_respected(database_url: str) -> None:
    code, seen = on_a_terminal("--database-url", database_url, "status", NO_COLOR="")
    assert code == 0
    assert "─" in seen
    assert "\x1b[1m" in seen

    code, seen = on_a_terminal("--database-url", database_url, "status", NO_COLOR="1")
    assert code == 0
    assert "\x1b[3" not in seen


def test_the_reader_of_a_pipe_may_leave_early() -> None:
    piped = subprocess.run(
        ["sh", "-c", '"$@" | true', "sh", *DURABLE, "migrate", "--sql"], capture_output=True, text=True, timeout=60
    )
    assert piped.stderr == ""


def test_a_terminal_without_unicode_gets_numbers_for_letters() -> None:
    done = process("status", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert "proj" in done.stderr


def test_json_is_one_line_in_a_pipe(database_url: str) -> None:
    done = process("--database-url", database_url, "status", "--json")
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["schema"]["name"] == "durable"
