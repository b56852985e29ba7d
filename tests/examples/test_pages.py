"""What the documentation says about commands, settings, numbers, codes and links is what the code has."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import click
import pytest
from celery.bin.celery import celery as celery_command

from durable_core import arguments, errors, refusals, retry, sweeps, testing
from durable_core.celery_binding import settings as settings_module
from durable_core.celery_binding import tasks as celery_tasks
from durable_core.celery_binding.settings import Settings
from durable_core.claims.claim import Holder
from durable_core.cli.main import main as durable_command
from durable_core.database import environment
from durable_core.deliveries import Cause, attempt, keys, options, read, slots, sweep
from durable_core.deliveries.declare import DeliveryKind, delivery, registry
from durable_core.deliveries.read import Delivery
from durable_core.errors import DurableError
from durable_core.exporter.metrics import METRICS, exposed
from durable_core.ready import notify
from durable_core.ready.attachments import MOST_BYTES
from durable_core.ready.bounded import MOST_ABANDONED
from durable_core.ready.webhook import Webhooks
from durable_core.retry import Backoff, rescue_seconds
from durable_core.states import DELIVERY_MOVES, DeliveryState
from durable_core.testing import plugin
from tests.examples.pages import ROOT, Page, page, pages, words

PAGES = [pytest.param(shown, id=shown.name) for shown in pages()]
CONTRACT = page("docs/contracts/deliveries.md")
REFUSING = (CONTRACT, page("docs/contracts/plans.md"), page("docs/contracts/cases.md"))
CELERY = page("docs/celery.md")
SETTINGS = page("docs/reference/settings.md")
CASES = [*range(1, 10), *range(11, 18), *range(19, 22), *range(23, 26)]


# --- links and commands -------------------------------------------------------------------------


@pytest.mark.parametrize("shown", PAGES)
def test_every_relative_link_resolves(shown: Page) -> None:
    for link in shown.links:
        if link.startswith(("https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (shown.path.parent / target).resolve() if target else shown.path
        assert path.exists(), f"{shown.name}: {link}"
        if anchor:
            assert anchor in Page(path).anchors, f"{shown.name}: {link}"


COMPLETE = {f"docs/reference/{name}.md" for name in ("errors", "environment", "schema")} | {CONTRACT.name}
"""These list all there is, so they name what another page is about."""


def test_no_two_pages_tell_the_same_in_a_table() -> None:
    """A fact that stands twice is mended once: the other page links."""
    told = [(shown.name, rows) for shown in pages() for rows in shown.first_columns() if shown.name not in COMPLETE]
    for (name, rows), (other, theirs) in itertools.combinations(told, 2):
        both = rows & theirs
        least = min(len(rows), len(theirs))
        assert name == other or len(both) < 3 or 2 * len(both) < least, f"{name} and {other}: {sorted(both)}"


@pytest.mark.parametrize("shown", PAGES)
def test_every_make_command_is_a_target(shown: Page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in shown.commands("make"):
        assert command[0] in targets, f"{shown.name}: make {' '.join(command)}"


@pytest.mark.parametrize(("program", "root"), [("durable", durable_command), ("celery", celery_command)])
@pytest.mark.parametrize("shown", [shown for shown in PAGES if shown.id != "docs/reference/commands.md"])
def test_every_command_exists_with_its_options(shown: Page, program: str, root: click.Group) -> None:
    for line in shown.commands(program):
        problem = misuse(root, line)
        assert problem is None, f"{shown.name}: {program} {' '.join(line)}: {problem}"


def misuse(root: click.Group, line: list[str]) -> str | None:
    """What is wrong with a command line: an unknown command or option, or no command at all."""
    command: click.Command = root
    options = option_names(root)
    before = ""
    for word in line:
        if word.startswith("-"):
            if word.split("=")[0] not in options:
                return f"no option {word}"
        elif isinstance(command, click.Group):
            found = command.get_command(click.Context(command), word)
            if found is not None:
                command = found
                options |= option_names(found)
            elif not before.startswith("-"):  # else it is that option's value
                return f"no command {word}"
        before = word
    return "a group alone" if isinstance(command, click.Group) else None


def option_names(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_a_command_that_is_not_there_would_be_noticed() -> None:
    assert misuse(durable_command, ["-A", "yourapp", "deliveries", "list", "--state", "dead"]) is None
    assert misuse(durable_command, ["-A", "yourapp", "surgeon"]) == "no command surgeon"
    assert misuse(durable_command, ["deliveries", "redrive", "ID", "--because", "TEXT"]) == "no option --because"
    assert misuse(durable_command, ["deliveries"]) == "a group alone"


@pytest.mark.parametrize("shown", PAGES)
def test_every_dotted_name_of_the_package_exists(shown: Page) -> None:
    for name in re.findall(r"`(durable_core(?:\.\w+)+)", shown.prose):
        parts = name.split(".")
        found: object = __import__("durable_core")
        for index, part in enumerate(parts[1:], start=2):
            try:
                found = getattr(found, part)
            except AttributeError:
                __import__(".".join(parts[:index]))
                found = getattr(found, part)


def test_no_page_names_a_folder_of_one_machine_or_a_package_registry() -> None:
    for shown in pages():
        assert not re.search(r"/(?:home|work|root|tmp|Users)/", shown.text), shown.name
        assert not re.search(r"\bpypi\b", shown.text, re.IGNORECASE), shown.name


# --- promises -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", PAGES)
def test_exactly_once_is_said_of_database_effects_alone(shown: Page) -> None:
    for found in re.finditer(r"exactly[ -]once", shown.text, re.IGNORECASE):
        before = shown.text[: found.start()].lower()
        assert re.search(r"database\s+effects\s+$", before), f"{shown.name}: …{before[-60:]}"


def test_the_readme_names_the_assumption_under_which_it_promises() -> None:
    for name in ("README.md", "docs/guarantees.md"):
        assert "holds while Postgres keeps what it acknowledged" in page(name).text


# --- settings -----------------------------------------------------------------------------------


def settings_read() -> set[str]:
    """The names of the settings, as `settings.py` spells them."""
    tree = ast.parse(inspect.getsource(settings_module))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {found for text in texts if (found := re.split(r"\W", text)[0]).startswith("durable_")} - {"durable_core"}


NOT_SETTINGS = re.compile(r"durable_(core|now|test_)(\b|$)")


def fixtures() -> set[str]:
    """The names that the pytest plugin has for its users."""
    tree = ast.parse(inspect.getsource(plugin))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("durable_")}


def test_every_fixture_of_the_plugin_is_explained_and_no_other() -> None:
    rows = re.findall(r"^\| (`durable_[^|]*) \|", page("docs/testing.md").text, re.MULTILINE)
    assert {name for row in rows for name in words(row)} == fixtures()


def test_every_setting_is_explained_and_no_other() -> None:
    explained = [words(row[0])[0] for row in SETTINGS.table("setting")]
    assert len(explained) == len(set(explained))
    assert set(explained) == settings_read()


@pytest.mark.parametrize("shown", PAGES)
def test_every_setting_named_exists(shown: Page) -> None:
    named = {name for name in re.findall(r"\bdurable_[a-z_]+\b", shown.text) if not NOT_SETTINGS.match(name)}
    assert named <= settings_read() | fixtures() | {
        name for metric in METRICS for name in (metric.name, *exposed(metric))
    }


def test_the_defaults_of_the_settings_are_those_of_the_code() -> None:
    defaults = Settings()
    of_the_code: dict[str, object] = {
        "durable_engine": None,
        "durable_sessionmaker": None,
        "durable_schema": defaults.schema,
        "durable_lease_seconds": defaults.lease_seconds,
        "durable_heartbeat_seconds": defaults.heartbeat_seconds,
        "durable_shutdown_grace": defaults.shutdown_grace,
        "durable_hints_per_queue": defaults.hints_per_queue,
        "durable_retention_days": defaults.retention_seconds / 86400,
        "durable_beat": defaults.beat,
        "durable_flower_payload": defaults.flower_payload,
        "durable_trace": defaults.trace,
        "durable_journal_key": defaults.journal_key,
        "durable_sweep_intervals": defaults.sweep_intervals,
    }
    shown = {words(row[0])[0]: row[2].strip("`") for row in SETTINGS.table("setting")}
    assert shown == {name: said(value) for name, value in of_the_code.items()}


def said(value: object) -> str:
    """A default as the table spells it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def test_the_sweeps_are_those_of_the_code() -> None:
    shown = [(words(row[0])[0], float(row[1]), row[2]) for row in CELERY.table("sweep")]
    assert shown == [(swept.name, swept.interval, swept.heals) for swept in sweeps.SWEEPS]
    assert f"hard limit: {celery_tasks.HARD_LIMIT_GRACE:g} s" in CELERY.text
    of_operations = celery_tasks.HARD_LIMIT_GRACE + celery_tasks.RECORDS["operation"]
    assert f"{of_operations:g} s after that of an operation" in CELERY.text


# --- the contract -------------------------------------------------------------------------------


def test_the_cases_are_numbered_as_everywhere() -> None:
    acceptance = CONTRACT.text.split("## Acceptance", 1)[1]
    assert [int(number) for number in re.findall(r"^(\d+)\. ", acceptance, re.MULTILINE)] == CASES


@pytest.fixture
def plain_kind() -> Iterator[DeliveryKind[..., Any]]:
    """A kind that declares nothing but its handler."""
    yield delivery("docs.plain")(lambda step: None)
    registry.remove("docs.plain")


def test_the_numbers_of_the_contract_are_those_of_the_code(plain_kind: DeliveryKind[..., Any]) -> None:
    holder, backoff = Holder(), Backoff()
    rescues = [rescue_seconds(interruption, lambda: 0.5) for interruption in range(1, 5)]
    of_the_code = {
        "lease": f"{holder.lease_seconds:g} s",
        "heartbeat": f"{holder.heartbeat_seconds:g} s",
        "timeout of one attempt": f"{plain_kind.timeout:g} s",
        "max_attempts": f"{plain_kind.max_attempts}",
        "back-off": ", ".join(f"{backoff.seconds(failure):g} s" for failure in range(1, 6)),
        "back-off jitter": f"{backoff.jitter * 100:g} %",
        "max_interruptions": f"{plain_kind.max_interruptions}",
        "rescue delay": ", ".join(f"{seconds:g} s" for seconds in rescues),
        "rescue delay, most": f"{retry.RESCUE.cap:g} s",
        "wait for an uncommitted twin of a key": keys.KEY_WAIT.replace("ms", " ms"),
        "largest arguments, and largest result": f"{arguments.MAX_BYTES} bytes",
        "deepest arguments": f"{arguments.MAX_DEPTH} levels",
        "longest key": "1000 bytes",
        "largest `max_attempts`, and largest `max_interruptions`": f"{options.LARGEST_BUDGET}",
        "priority, 0 being the most urgent": f"{plain_kind.priority}",
        "queue": f"`{plain_kind.queue}`",
        "retention of sent rows": f"{sweep.RETENTION_SECONDS / 86400:g} days",
        "longest `Retry(after=…)`": f"{attempt.LONGEST_RETRY_SECONDS:g} s",
        "next look at a due row that is paused or behind another": f"{sweep.IDLE_SECONDS:g} s",
    }
    assert {row[0]: row[1] for row in CONTRACT.table("number")} == of_the_code


def test_a_key_may_be_as_long_as_the_contract_says() -> None:
    options.Placement.of("docs.plain", {"key": "k" * 1000})
    with pytest.raises(errors.InvalidOption):
        options.Placement.of("docs.plain", {"key": "k" * 1001})


def test_the_numbers_of_the_guarantees_are_those_of_the_code() -> None:
    shown = page("docs/guarantees.md").text
    holder = Holder()
    intervals = {swept.name: swept.interval for swept in sweeps.SWEEPS}
    rescue = holder.lease_seconds + intervals["reap"] + intervals["dispatch"]
    assert (
        f"{rescue:g} s: lease {holder.lease_seconds:g}, reap {intervals['reap']:g}, dispatch {intervals['dispatch']:g}"
        in shown
    )
    assert f"within {rescue:g} s" in page("README.md").text
    assert f"within {intervals['dispatch']:g} s" in page("README.md").text
    assert f"at the {options.DEFAULT_MAX_INTERRUPTIONS + 1}st it is" in shown
    assert f"is given up after {holder.answer_seconds:g} s" in shown
    assert f"heartbeat ({holder.heartbeat_seconds:g} s)" in shown
    assert f"up to {sweep.HINTS_PER_QUEUE} hints" in shown
    assert f"tried {attempt.TRIES} times" in shown
    assert f"{attempt.TRIES} times in all" in CONTRACT.text
    assert (
        f"batches of {sweep.PRUNE_LIMIT} for at most {sweep.PRUNE_SECONDS:g} s an hour"
        in page("docs/operating.md").text
    )


def test_the_bounds_of_missed_slots_are_those_of_the_code() -> None:
    shown = {words(row[0])[0]: row for row in page("docs/periodic.md").table("`missed`")}
    ages = {"7 days": 7 * 86400.0, "60 s": 60.0, "24 hours": 86400.0}
    assert {word: ages[row[2]] for word, row in shown.items()} == {w: b.seconds for w, b in slots.MISSED.items()}
    assert f"the latest {slots.MISSED['all'].most} at most" in shown["all"][1]
    assert "(the default)" in next(row[0] for word, row in shown.items() if word == slots.DEFAULT_MISSED)


def test_every_refusal_is_listed_and_no_other() -> None:
    def below(error: type[DurableError]) -> set[str]:
        own = [kind for kind in error.__subclasses__() if kind.__module__ in (errors.__name__, refusals.__name__)]
        return {error.reason}.union(*(below(kind) for kind in own))

    listed = [row for contract in REFUSING for row in contract.table("reason")]
    assert {words(row[0])[0] for row in listed} == below(DurableError)


def test_every_code_and_log_event_named_is_in_the_source() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "durable_core").rglob("*.py"))
    codes = [code for row in CONTRACT.table("code") for code in words(row[0])]
    events = [event for row in page("docs/logging.md").table("said") for event in words(row[0])]
    for name in (*codes, *events):
        assert f'"{name}"' in source, name
    assert events


def test_the_columns_of_the_contract_exist() -> None:
    named = {name for row in CONTRACT.table("column") for name in words(row[0])}
    assert named <= {field.name for field in fields(Delivery)}


def test_the_states_and_moves_of_the_contract_are_legal() -> None:
    section = CONTRACT.text.split("## States", 1)[1].split("\n\n", 2)[1]
    assert [name for name in words(section) if name in set(DeliveryState)] == [state.value for state in DeliveryState]
    moves = {name for move in DELIVERY_MOVES for name in move.names}
    assert {row[0] for row in CONTRACT.table("move")} <= moves | {"enqueue", "keep"}


def test_every_cause_of_waiting_is_explained_and_no_other() -> None:
    shown = [word for row in page("docs/daily.md").table("cause") for word in words(row[0])]
    assert shown == [cause.value for cause in Cause]


def test_the_numbers_of_what_is_hinted_late_and_what_is_counted_are_those_of_the_code() -> None:
    dispatch = next(swept.interval for swept in sweeps.SWEEPS if swept.name == "dispatch")
    hinted, status = (" ".join(page(name).text.split()) for name in ("docs/daily.md", "docs/operating.md"))
    assert f"hinted by the next dispatch, within about {dispatch:g} s" in hinted
    assert f"frees within about {sweep.IDLE_SECONDS + dispatch:g} s" in hinted
    assert f"of the {read.COUNT_LIMIT:,} rows that were done with last" in status
    assert (read.EXPIRES_SOON_SECONDS, read.EXPIRED_LATELY_SECONDS) == (3600, 86400)


def test_the_codes_variables_and_numbers_of_the_ready_kinds_are_those_of_the_code() -> None:
    shown = page("docs/ready.md")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "durable_core" / "ready").glob("*.py"))
    for row in shown.table("code"):
        for code in words(row[0]):
            assert f'"{code}"' in source or code.removesuffix("…") in ("HTTP_", "SMTP_"), code
    named = {value for name, value in vars(environment).items() if name.endswith("_VARIABLE")}
    assert {words(row[0])[0] for row in shown.table("variable")} <= named
    webhooks, told = Webhooks(), " ".join(shown.text.split())
    assert f"at most {webhooks.total_timeout:g} s in all, {webhooks.connect_timeout:g} s of it to connect" in told
    assert f"{webhooks.answer_bytes} bytes of the answer" in told
    assert f"at most {MOST_BYTES} bytes" in told
    assert f"one of {MOST_ABANDONED} threads" in told
    share = inspect.signature(notify.declare).parameters["total_timeout"].default
    assert f"its share of {share:g} s" in told


def test_the_testing_kit_is_explained_in_full() -> None:
    named = {name for row in page("docs/testing.md").table("name") for name in words(row[0])}
    assert named == set(testing.__all__)


def test_every_decision_has_its_four_parts_and_its_number() -> None:
    found = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, path in enumerate(found, start=1):
        assert path.name.startswith(f"{number:04d}-")
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. ")
        for part in ("**Context.**", "**Decision.**", "**Cost.**", "**What would change our mind.**"):
            assert part in text, f"{path.name}: {part}"
