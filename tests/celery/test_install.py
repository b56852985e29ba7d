"""`install(app)`: explicit, once, and nothing of the host's app is changed or started by it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery

from beat_schedule import beat_schedule
from durable_core import DefinitionError, delivery, kinds, operation
from durable_core.cases import journal
from durable_core.celery_binding import Durable, installed
from durable_core.celery_binding.settings import Settings
from durable_core.celery_binding.tasks import HARD_LIMIT_GRACE
from durable_core.deliveries.declare import registry
from durable_core.errors import NotInstalled
from durable_core.operations.attempt import RECORD_SECONDS
from durable_core.sweeps import CONTROL_QUEUE, SWEEPS
from tests.celery.nodes import REPOSITORY
from tests.celery.world import installed_here


@pytest.fixture
def install_here() -> Iterator[Callable[[Celery], Durable]]:
    """`install`, undone after the test; nothing it is given may be connected to."""
    with ExitStack() as undone:
        yield lambda app: undone.enter_context(installed_here(app))


@pytest.fixture
def app() -> Celery:
    """A host's app that names its database by a function nobody may call, and a broker that is not there."""

    def engine() -> Any:
        raise AssertionError("the database was asked for")

    app = Celery("host", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.update(durable_engine=engine, timezone="Europe/Berlin", task_acks_late=True)
    return app


@pytest.fixture
def declare() -> Iterator[Callable[[str], Any]]:
    """Declare a kind by name, for this test alone."""
    names = []

    def declared(name: str, **terms: Any) -> Any:
        kind = delivery(name, **terms)(lambda step: None)
        names.append(name)
        return kind

    yield declared
    for name in names:
        registry.remove(name)


def host_task() -> None:
    """A task of the host's own."""


def run_python(program: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_second_install_gives_the_first_one_back(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[[str], Any]
) -> None:
    declare("install.twice")
    first = install_here(app)
    tasks = dict(app.tasks)

    assert install_here(app) is first is installed(app)
    assert dict(app.tasks) == tasks


def test_an_app_without_durable_work_says_so(app: Celery) -> None:
    with pytest.raises(NotInstalled, match="install"):
        installed(app)


def test_a_worker_whose_database_does_not_answer_says_why_with_a_time_and_the_facts_and_comes_up() -> None:
    """At first sight of a wrong address or password; Celery's own format hides the facts of a line."""
    done = subprocess.run(
        [sys.executable, "-c", UNANSWERED], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=90
    )
    assert "came up" in done.stderr  # Celery redirects what is printed to its log
    assert re.search(r"^\d{4}-.* schema_not_checked .*Connection refused", done.stderr, re.MULTILINE)
    assert re.search(r"^durable: this worker waits for its database.*Connection refused", done.stderr, re.MULTILINE)


UNANSWERED = """
import logging, os, signal
from celery import Celery, signals
from sqlalchemy import create_engine
from durable_core.celery_binding import install
app = Celery("host", broker="memory://")
app.conf.durable_engine = create_engine("postgresql+psycopg://a:secret@127.0.0.1:1/x")
install(app)
@signals.after_setup_logger.connect
def with_facts(logger, **_):
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s %(error)s", defaults={"error": "-"}))
@signals.worker_ready.connect
def ready(**_):
    print("came up", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
app.worker_main(["worker", "-P", "solo", "-l", "WARNING"])
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tests.celery.no_such:engine", "No module named.*the module must import here, and have that name"),
        ("tests.celery.nodes:no_such", "has no attribute.*the module must import here, and have that name"),
        ("tests.celery.nodes", "write it as 'module:name'"),
        (":engine", "write it as 'module:name'"),
    ],
)
def test_a_database_named_by_a_text_that_leads_nowhere_is_told_why(
    app: Celery, install_here: Callable[[Celery], Durable], text: str, said: str
) -> None:
    app.conf.durable_engine = text
    with pytest.raises(DefinitionError, match=said):
        install_here(app).database  # noqa: B018


def test_importing_and_installing_opens_and_starts_nothing() -> None:
    """Neither here nor in the deployable app: no thread, no socket, no log handler."""
    seen = run_python(
        """
import json, logging, threading, psutil
handlers = list(logging.getLogger().handlers)
import durable_core
from celery import Celery
from durable_core.celery_binding import install
app = Celery("host", broker="redis://127.0.0.1:1/0")
app.conf.durable_engine = lambda: 1 / 0
@durable_core.delivery("install.quiet")
def quiet(step): ...
install(app)
import tasks
me = psutil.Process()
print(json.dumps({
    "threads": threading.active_count(), "native": me.num_threads(),
    "sockets": len(me.net_connections()), "children": len(me.children()),
    "handlers": logging.getLogger().handlers == handlers,
}))
"""
    )
    assert seen == {"threads": 1, "native": seen["native"], "sockets": 0, "children": 0, "handlers": True}
    assert seen["native"] <= 2


def test_a_kind_becomes_a_task_with_options_of_its_own(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[..., Any]
) -> None:
    declare("install.options", timeout=7)
    install_here(app)
    task = app.tasks["install.options"]

    # Although the host's default is late acknowledgement.
    assert app.conf.task_acks_late is True
    assert task.acks_late is False
    assert (task.ignore_result, task.max_retries, task.serializer) == (True, 0, "json")
    assert task.soft_time_limit == 7
    assert task.time_limit == 7 + HARD_LIMIT_GRACE
    for sweep in SWEEPS:
        task = app.tasks[sweep.task]
        assert (task.acks_late, task.ignore_result, task.max_retries) == (False, True, 0)


def test_the_hard_limit_of_an_operation_leaves_its_ids_the_time_that_is_promised(
    app: Celery, install_here: Callable[[Celery], Durable]
) -> None:
    kind = operation("install.operation", timeout=7)(lambda step: [])
    try:
        install_here(app)
        task = app.tasks[kind.name]
    finally:
        kinds.operations.remove(kind.name)
    assert (task.soft_time_limit, task.time_limit) == (7, 7 + RECORD_SECONDS + HARD_LIMIT_GRACE)


@pytest.mark.parametrize("given", [{}, {"id": 7}, {"id": "no id"}])
def test_a_kind_sent_by_celerys_own_means_carries_out_nothing_and_says_so(
    app: Celery,
    install_here: Callable[[Celery], Durable],
    declare: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    given: dict[str, object],
) -> None:
    declare("install.sent")
    install_here(app)
    assert app.tasks["install.sent"](**given) == "nothing to do"
    assert [(record.message, record.kind) for record in caplog.records] == [("task_without_delivery", "install.sent")]


def test_no_setting_of_the_app_is_changed_but_the_missing_beat_entries(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[[str], Any]
) -> None:
    declare("install.settings")
    untouched = Celery("host", broker="redis://127.0.0.1:1/0", set_as_current=False)
    untouched.conf.update(durable_engine=app.conf.durable_engine, timezone="Europe/Berlin", task_acks_late=True)
    untouched.finalize()
    install_here(app)
    app.finalize()

    before, after = ({**app.conf.table(with_defaults=True, censored=False)} for app in (untouched, app))
    added = after.pop("beat_schedule")
    assert before.pop("beat_schedule") == {}
    assert after == before
    assert {entry["task"] for entry in added.values()} == {sweep.task for sweep in SWEEPS}


def test_beat_entries_of_the_host_are_kept_and_only_missing_ones_added(
    app: Celery, install_here: Callable[[Celery], Durable]
) -> None:
    own = {
        "nightly": {"task": "host.nightly", "schedule": 86400.0},
        "my-dispatch": {"task": "durable.dispatch", "schedule": 0.25, "options": {"queue": CONTROL_QUEUE}},
    }
    app.conf.beat_schedule = dict(own)
    install_here(app)
    app.finalize()

    assert {name: app.conf.beat_schedule[name] for name in own} == own
    assert sorted(entry["task"] for entry in app.conf.beat_schedule.values()) == [
        "durable.cron", "durable.dispatch", "durable.expire", "durable.ingest", "durable.poll", "durable.prune",
        "durable.reap", "host.nightly",
    ]  # fmt: skip


def test_a_setting_leaves_beat_alone(app: Celery, install_here: Callable[[Celery], Durable]) -> None:
    app.conf.durable_beat = False
    install_here(app)
    app.finalize()

    assert app.conf.beat_schedule == {}
    assert "durable.dispatch" in app.tasks


def test_kinds_declared_after_install_are_tasks_too(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[[str], Any]
) -> None:
    install_here(app)
    declare("install.early")
    app.finalize()
    declare("install.late")

    assert {"install.early", "install.late"} <= set(app.tasks)


def test_a_kind_named_like_an_existing_task_is_a_definition_error(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[[str], Any]
) -> None:
    app.task(name="install.taken", shared=False)(host_task)
    app.finalize()
    declare("install.taken")
    with pytest.raises(DefinitionError, match=r"install\.taken"):
        install_here(app)


def test_a_kind_declared_later_under_a_task_s_name_is_a_definition_error(
    app: Celery, install_here: Callable[[Celery], Durable], declare: Callable[[str], Any]
) -> None:
    app.task(name="install.taken.later", shared=False)(host_task)
    install_here(app)
    app.finalize()
    try:
        with pytest.raises(DefinitionError, match=r"install\.taken\.later"):
            declare("install.taken.later")
    finally:
        registry.remove("install.taken.later")


def test_a_wrong_setting_is_named(app: Celery, install_here: Callable[[Celery], Durable]) -> None:
    app.conf.durable_sweep_intervals = {"dispatchh": 1}
    durable = install_here(app)
    with pytest.raises(DefinitionError, match="dispatchh"):
        _ = durable.settings


def test_the_key_of_the_journals_is_the_apps(app: Celery, install_here: Callable[[Celery], Durable]) -> None:
    app.conf.durable_journal_key = "of the app"
    install_here(app)
    assert journal.current_key() == b"of the app"
    app.conf.durable_journal_key = ""
    with pytest.raises(DefinitionError, match="durable_journal_key: give a text"):
        Settings.of(app)


def test_the_deployable_schedule_and_app_are_the_sweeps_spelled_out() -> None:
    assert beat_schedule == {
        f"durable-{sweep.name}": {
            "task": sweep.task, "schedule": sweep.every, "options": {"queue": CONTROL_QUEUE},
        }
        for sweep in SWEEPS
    }  # fmt: skip

    seen = run_python(
        """
import json
from tasks import app
app.loader.import_default_modules()
app.finalize()
from durable_core import kinds
print(json.dumps({
    "beat": app.conf.beat_schedule,
    "tasks": sorted(name for name in app.tasks if not name.startswith("celery.")),
    "kinds": sorted(kind.name for kind in kinds.deliveries),
}))
"""
    )
    assert seen["beat"] == beat_schedule
    assert {"email.send", "webhook.post"} <= set(seen["kinds"])
    assert seen["tasks"] == sorted([*seen["kinds"], *(sweep.task for sweep in SWEEPS)])
