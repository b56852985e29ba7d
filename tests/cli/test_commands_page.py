"""docs/commands.md: each sample is what the command prints, on a night as the page has it."""

import re
import shlex
import socket
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from sqlalchemy import Engine, text

from durable_core import Backoff, Retry, deliveries
from durable_core.cli.main import main
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker, perform
from durable_core.deliveries.declare import Step
from durable_core.periodic.sweep import fire
from durable_core.testing import Made, MovableClock, make_delivery
from tests.cli.conftest import value_of
from tests.examples.pages import Block, page

Run = Callable[..., Result]
PAGE = page("docs/commands.md")

EXPLAINED = (
    "status", "find", "why", "errors", "queues", "kinds", "journal", "config", "report", "pauses",
    "deliveries list", "deliveries show",
)  # fmt: skip
"""The commands that look, all of whose options the page names."""


@pytest.fixture
def night(engine: Engine, database: Database, declare: Callable[..., Any], worker: Worker, clock: MovableClock) -> None:
    """Three letters died of one error, letters are paused, a reminder waits behind an invoice that is tried again."""
    clock.freeze()
    # Three in the morning, whenever this runs: no slot of a schedule comes in between.
    clock.advance((timedelta(hours=27) - (clock.now() - clock.now().replace(hour=0, minute=0))).total_seconds())

    def make(kind: Any, arguments: dict[str, object], **how: Any) -> Made:
        with engine.begin() as tx:
            return make_delivery(tx, kind, arguments, **how)

    def printing(step: Step, n: int) -> None:
        raise OSError(f"printer {n} is on fire")

    def sending(step: Step, n: int) -> None:
        raise Retry("the mail server is busy")

    letter = declare(printing, name="invoice.print", queue="letters", max_attempts=1)
    mail = declare(sending, name="invoice.send", queue="mail", max_attempts=4, backoff=Backoff(base=600, factor=2))
    declare(lambda step: None, name="report.daily", cron="0 8 * * *", timezone="Europe/Prague")
    fire(database)
    for n in range(8):
        make(mail, {"n": n}, state="sent")
    for n in range(3):
        clock.advance(300)
        perform(worker, letter, make(letter, {"n": n}).id)
    clock.advance(300)
    gone = make(mail, {"n": 0})
    with engine.begin() as tx:
        deliveries.pause(tx, "queue", "letters", by="dana", reason="the printer is on fire")
        deliveries.cancel(tx, gone.id, by="anna", reason="the order was withdrawn")
    for n in range(4):
        make(letter, {"n": n})
    invoice = make(mail, {"n": 7}, key="order:7:invoice", ordering_key="customer:9")
    make(mail, {"n": 7}, key="order:7:reminder", ordering_key="customer:9")
    clock.advance(400)
    perform(worker, mail, invoice.id)
    clock.advance(12)
    with engine.begin() as tx:
        for name, seconds, moved in (
            ("dispatch", 1, 2),
            ("reap", 3, 0),
            ("cron", 1, 0),
            ("poll", 1, 0),
            ("expire", 9, 0),
            ("ingest", 4, 0),
        ):
            tx.execute(
                text(
                    "insert into durable.loops (name, began_at, ended_at, moved) select :name, at, at, :moved from"
                    " (select durable.durable_now() - make_interval(secs => :seconds) as at) as began"
                    " on conflict (name) do update set began_at = excluded.began_at, moved = excluded.moved"
                ),
                {"name": name, "seconds": seconds, "moved": moved},
            )


@pytest.fixture
def yourapp(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "yourapp.py").write_text(
        textwrap.dedent(f"""
            import os
            from celery import Celery
            from sqlalchemy import create_engine
            from durable_core.celery_binding import install
            app = Celery("yourapp", broker="memory://", set_as_current=False)
            app.conf.durable_engine = create_engine({url!r})
            app.conf.durable_lease_seconds = 60
            app.conf.durable_retention_day = 30
            install(app)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "yourapp", raising=False)


def samples() -> list[tuple[str, str]]:
    """Each command that the page shows, and what it says it prints."""
    blocks: list[Block] = PAGE.blocks
    return [
        (one.body.strip(), other.body) for one, other in pairwise(blocks)
        if one.tag == "sh" and other.tag == "text"
    ]  # fmt: skip


def printed(durable: Run, run: Run, command: str) -> str:
    """What the command prints: of a check its verdict, which is on stderr."""
    line = shlex.split(command)[1:]
    result = (run if "-A" in line else durable)(*line)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stderr if "--check" in line else result.stdout


def alike(said: str) -> list[list[str]]:
    """The words of each line; what differs from one run to the next has one spelling."""
    said = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "ID", said)
    said = re.sub(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z", "INSTANT", said)
    said = re.sub(r"postgresql\S+", "URL", said)
    said = re.sub(rf"\b(worker-1|{re.escape(socket.gethostname())}):\d+", "PROCESS", said)
    lines = [line.split() for line in said.strip().splitlines()]
    if lines and lines[0][:1] == ["LINE"]:
        lines[1:] = [["NUMBER", *words[1:]] for words in lines[1:]]
    return lines


def test_each_sample_is_what_its_command_prints(durable: Run, run: Run, night: None, yourapp: None) -> None:
    assert len(samples()) >= 14
    for command, sample in samples():
        assert alike(printed(durable, run, command)) == alike(sample), command


def test_the_commands_without_a_sample_run_too(durable: Run, run: Run, night: None, yourapp: None) -> None:
    shown = {block.body.strip() for block in PAGE.blocks if block.tag == "sh"} - {command for command, _ in samples()}
    assert shown == {"durable report -A yourapp"}
    for command in shown:
        assert run(*shlex.split(command)[1:]).exit_code == 0


def test_every_option_of_a_command_that_looks_is_on_the_page() -> None:
    for name in EXPLAINED:
        command: click.Command = main
        for word in name.split():
            assert isinstance(command, click.Group)
            command = command.commands[word]
        several = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        assert f"durable {name}" in PAGE.text
        for one in several:
            for option in (option for parameter in one.params for option in parameter.opts if option.startswith("--")):
                assert option in PAGE.text or option == "--app", f"{name} {option}"


NAMES = {
    "status": "cases count_limit dead expired expired_within_seconds expiring expiring_within_seconds failed healthy "
    "now oldest_lapsed_lease_seconds operations pauses plans problems queues schema sweeps waiting",
    "status > queues": "behind due held later oldest_due_age_seconds oldest_due_at paused processing queue retrying "
    "waiting_for_arguments waiting_for_handler",
    "status > pauses": "by name reason since until what",
    "find customer:9": "found most_of_each",
    "find customer:9 > found": "by id kind look queue state what",
    "why order:7:invoice": "also id kind queue readers state waits what why",
    "why order:7:invoice > waits": "ahead blocks cause pause says until",
    "errors list": "complete errors looked_at next_after",
    "errors list > errors": "count dead error_code failed fingerprint first_seen_at kind last_seen_at retrying sample "
    "shape",
    "errors show d0da21": "complete deliveries error next_after",
    "errors show d0da21 > deliveries": "due_at failed_at id queue state",
    "queues": "next_after queues",
    "queues > queues": "counts kinds last_finished_at oldest_due_age_seconds oldest_due_at pause queue",
    "queues > queues counts": "canceled dead due expired failed later operations processing retrying sent steps",
    "queues > queues counts due": "at_least rows",
    "kinds": "kinds next_after",
    "kinds > kinds": "counts declared kind last_finished_at oldest_due_age_seconds oldest_due_at pause policy queues",
    "kinds -A yourapp > kinds policy": "backoff cron formerly max_attempts max_interruptions missed ordering priority "
    "queue timeout_seconds timezone",
    "journal": "lines looked_at next_after",
    "journal > lines": "at attempt by contract facts fence from_state kind move reason row_id seq to_state",
    "pauses > pauses": "by name reason since until what",
    "config": "app problems settings unknown variables",
    "config > settings": "name source value",
    "report": "app database platform versions",
    "report > database": "count_limit deliveries error_codes for_a_person kinds pauses queues schema server sweeps",
}
"""The names of the fields of each answer, and of what is in it. Scripts and dashboards of users read them."""


@pytest.mark.parametrize("what", NAMES)
def test_the_names_in_the_json_are_these(durable: Run, run: Run, night: None, yourapp: None, what: str) -> None:
    """A name that is added belongs here; one that is renamed breaks somebody's script."""
    command, steps = what.split(" > ") if " > " in what else (what, "")
    command_words = command.split()
    seen: Any = value_of((run if "-A" in command_words else durable)(*command_words, "--json"))
    for step in steps.split():
        seen = seen[step]
        seen = seen[0] if isinstance(seen, list) else seen
    assert sorted(seen) == NAMES[what].split()


def instants(value: Any) -> list[str]:
    """All that is an instant in an answer, but in the facts of the journal, which are as they were written."""
    if isinstance(value, dict):
        return [found for name, one in value.items() if name != "facts" for found in instants(one)]
    if isinstance(value, list):
        return [found for one in value for found in instants(one)]
    return [value] if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\dT", value) else []


def test_every_instant_in_the_json_is_in_utc(durable: Run, night: None) -> None:
    seen = 0
    for command in ("status", "queues", "kinds", "errors", "journal", "pauses", "cron list", "deliveries list"):
        found = instants(value_of(durable(*command.split(), "--json")))
        assert all(one.endswith("Z") for one in found), command
        seen += len(found)
    assert seen > 30
