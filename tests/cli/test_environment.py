"""The two apps that are told by their environment where their servers are: `tasks`, and the one of `durable up`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine

from durable_core.celery_binding import environment
from durable_core.database import environment as variables
from durable_core.errors import NotInstalled
from durable_core.ready.environment import smtp_from_environment

ROOT = Path(__file__).resolve().parents[2]
FACTS = """
import importlib, json, sys
from durable_core.celery_binding import installed
from durable_core.errors import NotInstalled
app = importlib.import_module(sys.argv[1]).app
options = dict(app.conf.broker_transport_options)
try:
    url = installed(app).database.engine.url.render_as_string()
except NotInstalled as error:
    url = str(error)
broker = app.conf.broker_url
print(json.dumps({"url": url, "broker": broker, "schema": installed(app).settings.schema, "options": options}))
"""

READ = """
import json
from durable_core.cli.minimal import app
app.Worker(loglevel="ERROR")  # without -Q, as `durable up` starts it; no server answers it
print(json.dumps(sorted(app.amqp.queues.consume_from)))
"""


@pytest.fixture(params=["tasks", "durable_core.cli.minimal"])
def app(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def facts(app: str, **variables: str) -> dict[str, object]:
    """What the app knows in a process of its own: both declare the same kinds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DURABLE_")}
    done = subprocess.run(
        [sys.executable, "-c", FACTS, app], env={**kept, **variables}, check=True, capture_output=True, text=True
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_an_app_without_its_variables_loads_and_says_which_one_it_misses(app: str) -> None:
    found = facts(app, DURABLE_DATABASE_URL="")
    assert str(found["url"]).startswith("set DURABLE_DATABASE_URL, for example postgresql+psycopg://")
    assert (found["broker"], found["schema"]) == ("durable-redis://127.0.0.1:6379/0", "durable")


def test_an_app_finds_its_servers_and_waits_for_none_of_them_for_ever(app: str) -> None:
    found = facts(
        app, DURABLE_DATABASE_URL="postgresql+psycopg://db.example/shop", DURABLE_REDIS_URL="rediss://broker.example/3",
        DURABLE_SCHEMA="work_2",
    )  # fmt: skip
    assert (found["url"], found["schema"]) == ("postgresql+psycopg://db.example/shop", "work_2")
    assert found["broker"] == "durable-rediss://broker.example/3"
    assert found["options"] == environment.BROKER_TRANSPORT_OPTIONS
    assert {"socket_timeout", "socket_connect_timeout"} <= set(environment.BROKER_TRANSPORT_OPTIONS)


@pytest.mark.parametrize("given", ["postgresql://db.example/shop", "postgres://db.example/shop"])
def test_an_address_without_a_driver_is_for_psycopg_3(app: str, given: str) -> None:
    assert facts(app, DURABLE_DATABASE_URL=given)["url"] == "postgresql+psycopg://db.example/shop"


@pytest.mark.parametrize("given", ["topsecret", "postgresql+psycopg2://a:topsecret@db.example/shop", "sqlite:///a.db"])
def test_an_address_that_cannot_work_is_a_sentence_with_the_variable_and_the_right_form(app: str, given: str) -> None:
    said = str(facts(app, DURABLE_DATABASE_URL=given)["url"])
    assert said.startswith("DURABLE_DATABASE_URL ")
    assert "write postgresql+psycopg://" in said
    assert "topsecret" not in said


def test_the_app_of_up_leaves_the_plain_tasks_of_an_app_on_the_same_broker_to_their_workers() -> None:
    """A worker throws away a task that it does not know, and those of a Celery app lie in `celery`."""
    done = subprocess.run(
        [sys.executable, "-c", READ], check=True, capture_output=True, text=True,
        env={**os.environ, "DURABLE_DATABASE_URL": "postgresql+psycopg://nobody@127.0.0.1:1/none"},
    )  # fmt: skip
    assert json.loads(done.stdout) == ["durable.durable"]  # and, once it starts, what `install` adds


def test_the_engine_is_made_once_and_notices_a_server_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    monkeypatch.setenv("DURABLE_DATABASE_URL", engine.url.render_as_string(hide_password=False))
    ours = environment.engine_from_environment()
    assert environment.engine_from_environment() is ours
    try:
        with ours.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            told = driver.info.get_parameters()
    finally:
        ours.dispose()
    assert (told["connect_timeout"], told["keepalives_idle"], told["tcp_user_timeout"]) == ("5", "10", "30000")


def test_a_mail_server_that_is_not_named_is_missed_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURABLE_SMTP_URL", raising=False)
    with pytest.raises(NotInstalled, match="set DURABLE_SMTP_URL"):
        smtp_from_environment()


def test_the_name_of_each_variable_is_spelled_once() -> None:
    names = {value for name, value in vars(variables).items() if name.endswith("_VARIABLE")}
    spelled = Counter(
        node.value
        for folder in ("durable_core", "tasks")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    )
    assert dict(spelled) == dict.fromkeys(names, 1)
