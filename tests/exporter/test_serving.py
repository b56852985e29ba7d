"""`durable exporter` as a process: its page and its probes, with the database there and away."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from durable_core.database.connections import Database
from durable_core.exporter import sample
from durable_core.exporter.observe import Observer
from durable_core.exporter.serve import Server
from durable_core.testing import create_database, drop_database, migrated
from tests.cli.conftest import DURABLE, process
from tests.relay import Relay


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def until(look: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


@pytest.fixture
def own(services) -> Iterator[Engine]:
    """A database of its own, for others to be shut out of."""
    engine = migrated(create_database(services.database_url, "durable_served"))
    yield engine
    engine.dispose()
    drop_database(services.database_url, "durable_served")


@pytest.fixture
def served(own) -> Iterator[str]:
    """The exporter as a process of its own; its address."""
    url = own.url.render_as_string(hide_password=False)
    running = subprocess.Popen(
        [*DURABLE, "exporter", "--port", "0", "--interval", "1", "--json", "--database-url", url],
        stdout=subprocess.PIPE, text=True, env={k: v for k, v in os.environ.items() if not k.startswith("DURABLE_")},
    )  # fmt: skip
    assert running.stdout is not None
    yield json.loads(running.stdout.readline())["url"].removesuffix("/metrics")
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0
    running.stdout.close()


def test_the_process_serves_what_the_rows_say_and_survives_a_database_that_goes_and_comes_back(
    served, own, services, declare
):
    kind = declare()
    with own.begin() as tx:
        kind.enqueue(tx)
    until(lambda: get(f"{served}/readyz")[0] == 200)
    until(lambda: f'kind="{kind.name}",queue="durable",state="pending"}} 1.0' in get(f"{served}/metrics")[1])
    assert get(f"{served}/livez")[0] == 200
    assert get(f"{served}/elsewhere")[0] == 404
    assert json.loads(get(f"{served}/healthz")[1])["status"] in ("pass", "warn")

    admin = create_engine(services.database_url, isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as tx:
            tx.execute(text("alter database durable_served allow_connections false"))
            tx.execute(text("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'durable_served'"))
        until(lambda: get(f"{served}/readyz")[0] == 503)
        status, page = get(f"{served}/metrics")
        assert (status, "durable_up 0.0" in page) == (200, True)
        assert re.search(r'durable_exporter_errors_total{query="schema"} [1-9]', page)
        assert "durable_deliveries{" not in page
        assert get(f"{served}/livez")[0] == 200
        status, told = get(f"{served}/healthz")
        assert status == 503
        assert [check["name"] for check in json.loads(told)["checks"]] == ["database"]
    finally:
        with admin.connect() as tx:
            tx.execute(text("alter database durable_served allow_connections true"))
        admin.dispose()
    until(lambda: get(f"{served}/readyz")[0] == 200)
    assert "durable_up 1.0" in get(f"{served}/metrics")[1]


def test_with_an_app_the_process_knows_the_apps_own_intervals(engine, tmp_path):
    url = engine.url.render_as_string(hide_password=False)
    (tmp_path / "shop.py").write_text(
        "from celery import Celery\nfrom sqlalchemy import create_engine\n"
        "from durable_core.celery_binding import install\napp = Celery('shop')\n"
        f"app.conf.durable_engine = create_engine({url!r})\napp.conf.durable_sweep_intervals = {{'reap': 11}}\n"
        "install(app)\n"
    )
    running = subprocess.Popen(
        [*DURABLE, "-A", "shop", "exporter", "--port", "0", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        page = get(json.loads(running.stdout.readline())["url"])[1]
    finally:
        running.terminate()
        assert running.wait(30) == 0
        running.stdout.close()
    assert 'durable_loop_interval_seconds{loop="reap"} 11.0' in page


def test_reading_the_page_does_not_ask_the_database(engine, make):
    """The observer looks once; a hundred readers read what it saw."""
    make()
    observer = Observer(Database(engine))
    observer.observe()
    before = observer.good_at
    server = Server(("127.0.0.1", 0), observer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        pages = {get(f"http://127.0.0.1:{server.server_address[1]}/metrics")[1] for _ in range(100)}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert len(pages) == 1
    assert observer.good_at == before


def test_a_sample_that_hangs_makes_it_not_ready_and_its_connection_is_given_up(engine, monkeypatch):
    """The network swallows a statement: nothing answers, nothing is refused, and the last sample gets old."""
    monkeypatch.setattr(sample, "ANSWER_SECONDS", 2.0)
    relay = Relay(engine.url.host, engine.url.port)
    far = create_engine(engine.url.set(host="127.0.0.1", port=relay.port))
    observer = Observer(Database(far), interval=0.2)
    observer.start()
    try:
        until(lambda: observer.is_ready)
        relay.silence_before(b"waiting_queues")
        until(lambda: not observer.is_ready)
        assert observer.series()
        until(lambda: observer.is_ready)
    finally:
        observer.stop()
        far.dispose()
        relay.close()


def test_a_machine_without_the_library_gets_one_clear_sentence(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['prometheus_client'] = None\n")
    done = process(
        "exporter", "--database-url", "postgresql://nobody@127.0.0.1:1/none", env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "durable: the exporter needs prometheus-client, which is not installed: pip install 'durable-core[metrics]'."
    )


def test_a_port_that_is_taken_is_told_with_what_to_do(engine):
    url = engine.url.render_as_string(hide_password=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = process("exporter", "--database-url", url, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "name another --port" in done.stderr


def test_the_command_line_loads_no_library_of_metrics_for_other_commands():
    code = "import sys, durable_core.cli.main; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
