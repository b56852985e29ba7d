"""What the doctor says of the app: its settings, its beat entries and its broker; no worker is needed for it."""

from contextlib import ExitStack

import pytest
from celery import Celery

from durable_core.celery_binding import doctor as of_celery
from durable_core.celery_binding import environment
from durable_core.celery_binding.transport import guarded
from durable_core.deliveries.declare import delivery, registry
from durable_core.doctor import process
from durable_core.doctor.findings import Reason, Status, examine
from tests.celery.nodes import Broker, ValkeyContainer
from tests.celery.world import installed_here
from tests.doctor.conftest import is_mendable

WELL = {
    "worker_prefetch_multiplier": 1,
    "broker_transport_options": {"socket_timeout": 5},
    "accept_content": ["json"],
}


@pytest.fixture
def host(services):
    """`host(task_acks_late=True)`: an app of a host's with our work, on the suite's broker, and so configured."""
    with ExitStack() as undone:

        def _host(broker=None, **settings):
            app = Celery("host", broker=broker or guarded(services.redis_url), set_as_current=False)
            app.conf.update(durable_engine="nobody:asks", **WELL | settings)
            return undone.enter_context(installed_here(app))

        yield _host


def test_an_app_as_it_should_be_is_well(host):
    durable = host()
    made = examine([check for check in of_celery.checks(durable, dict) if check.name != "workers"])
    assert [finding.check for finding in made.of(Status.PASS)] == [
        "settings", "modules", "beat", "celery", "broker", "broker_server",
    ]  # fmt: skip
    assert len(made.findings) == 6


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"worker_prefetch_multiplier": 4}, Reason.PREFETCH_HOARDS),
        ({"task_acks_late": True}, Reason.LATE_ACKS),
        ({"broker_transport_options": {"socket_timeout": 5, "visibility_timeout": 30}}, Reason.VISIBILITY_SHORT),
        ({"accept_content": ["json", "pickle"]}, Reason.ACCEPTS_PICKLE),
        ({"broker_transport_options": {}}, Reason.BROKER_UNBOUNDED),
    ],
)
def test_a_setting_of_celery_that_harms_warns(host, settings, reason):
    (finding,) = of_celery.celery_settings(host(**settings))
    assert is_mendable(finding, reason, Status.WARN)


def test_a_visibility_timeout_below_the_longest_handler_warns(host):
    durable = host(broker_transport_options={"socket_timeout": 5, "visibility_timeout": 600})
    assert of_celery.celery_settings(durable)[0].status is Status.PASS
    delivery("test.doctor_slow", timeout=900)(lambda step: None)
    try:
        assert of_celery.celery_settings(durable)[0].reason is Reason.VISIBILITY_SHORT
    finally:
        registry.remove("test.doctor_slow")


@pytest.mark.parametrize(
    ("wrong", "says", "left"),
    [
        ({"durable_lease_seconds": -1}, ["durable_lease_seconds=-1"], {"lease_seconds": 30.0}),
        ({"durable_schema": "Not So"}, ['"durable" is looked at instead'], {"schema": "durable"}),
        ({"durable_sweep_intervals": 5}, ["durable_sweep_intervals: TypeError"], {"sweep_intervals": {}}),
        ({"durable_sweep_intervals": {"reap": "often"}}, ["durable_sweep_intervals['reap']"], {"sweep_intervals": {}}),
        (
            {"durable_lease_seconds": 30, "durable_heartbeat_seconds": 20},
            ["is less than three heartbeats"],
            {"lease_seconds": 30.0, "heartbeat_seconds": 8.0},
        ),
        (
            {"durable_trace": "odd", "durable_retention_days": 0, "durable_flower_payload": "no"},
            ["durable_retention_days=0", "durable_flower_payload='no'", "durable_trace='odd'"],
            {"retention_seconds": 14 * 86400.0},
        ),
    ],
)
def test_a_setting_of_ours_that_cannot_be_used_is_one_finding_and_the_others_count(host, wrong, says, left):
    durable = host(**{"durable_schema": "work_2", "durable_shutdown_grace": 7} | wrong)
    made = examine(of_celery.checks(durable, dict)[:4])
    findings = made.of(Status.FAIL)
    assert len(findings) == len(says)
    for finding, words in zip(findings, says, strict=True):
        assert is_mendable(finding, Reason.SETTINGS_INVALID, Status.FAIL)
        assert words in finding.observed
    assert [finding.check for finding in made.of(Status.PASS)] == ["modules", "celery"]
    assert made.skipped == {"beat": "settings failed"}
    at_hand = of_celery.usable(durable).settings
    assert {name: getattr(at_hand, name) for name in left} == left
    assert at_hand.shutdown_grace == 7
    assert at_hand.schema == left.get("schema", "work_2")
    assert len(of_celery.installation(durable).sweeps) == 7


def test_intervals_that_are_the_defaults_for_want_of_the_apps_own_are_called_so(host):
    assert of_celery.installation(host(durable_sweep_intervals={"reap": 7})).assumed == ""
    assumed = of_celery.installation(host(durable_sweep_intervals={"reap": -7})).assumed
    assert assumed == "the interval is the default, for durable_sweep_intervals cannot be used"


def test_a_module_that_cannot_be_imported_fails_with_its_name(host):
    (finding,) = of_celery.modules(host(imports=["no.such_module"]))
    assert is_mendable(finding, Reason.MODULES_NOT_LOADED, Status.FAIL)
    assert "no" in finding.observed


def test_a_beat_schedule_that_was_assigned_after_the_app_was_finalised_fails(host):
    durable = host()
    durable.app.finalize()
    assert [finding.status for finding in of_celery.beat(durable)] == [Status.PASS]
    durable.app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 60}}
    (finding,) = of_celery.beat(durable)
    assert is_mendable(finding, Reason.BEAT_ENTRY_MISSING, Status.FAIL)
    assert "durable.dispatch, durable.reap" in finding.observed
    # The mend, as it is told.
    durable.app.conf.beat_schedule.update(durable.beat_schedule())
    assert [one.status for one in of_celery.beat(durable)] == [Status.PASS]


def test_one_that_was_assigned_before_keeps_ours(host):
    durable = host(beat_schedule={"mine": {"task": "mine", "schedule": 60}})
    durable.app.finalize()
    assert [finding.status for finding in of_celery.beat(durable)] == [Status.PASS]


def test_an_entry_that_goes_to_another_queue_warns(host):
    schedule = {"reap": {"task": "durable.reap", "schedule": 5}}
    durable = host(beat_schedule=schedule)
    durable.app.finalize()
    (finding,) = of_celery.beat(durable)
    assert is_mendable(finding, Reason.BEAT_ENTRY_ELSEWHERE, Status.WARN)
    assert finding.observed == "the beat entry of durable.reap goes to the default queue"


def test_entries_that_the_host_keeps_elsewhere_are_left_to_the_age_of_the_sweeps(host):
    durable = host(durable_beat=False)
    durable.app.finalize()
    (finding,) = of_celery.beat(durable)
    assert (finding.status, "durable_beat is off" in finding.observed) == (Status.PASS, True)


# --- the broker ---------------------------------------------------------------------------------------


@pytest.fixture
def valkey(tmp_path):
    """`valkey("maxmemory 1mb")`: a Valkey of this test's own, with these lines in its configuration."""
    started = []

    def _valkey(*lines):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        broker = Broker(ValkeyContainer(folder, lines))
        started.append(broker)
        broker.ready()
        return broker

    yield _valkey
    for broker in started:
        broker.teardown()


@pytest.mark.parametrize(
    ("lines", "reason", "status"),
    [
        (("maxmemory 100mb", "maxmemory-policy allkeys-lru"), Reason.BROKER_EVICTS, Status.WARN),
        (("replicaof 127.0.0.1 1",), Reason.BROKER_IS_REPLICA, Status.FAIL),
        (("maxmemory 1kb",), Reason.BROKER_NEARLY_FULL, Status.WARN),
    ],
)
def test_a_broker_that_does_not_keep_what_it_is_given_is_told(host, valkey, lines, reason, status):
    (finding,) = of_celery.broker_server(host(broker=guarded(valkey(*lines).url)))
    assert is_mendable(finding, reason, status)


def test_a_broker_without_the_guard_warns(host, services):
    (finding,) = of_celery.broker(host(broker=services.redis_url))
    assert is_mendable(finding, Reason.BROKER_UNGUARDED, Status.WARN)


def test_another_broker_than_redis_warns(host):
    durable = host(broker="memory://")
    (finding,) = of_celery.broker(durable)
    assert is_mendable(finding, Reason.BROKER_NOT_REDIS, Status.WARN)
    assert of_celery.broker_server(durable)[0].status is Status.PASS


def test_a_broker_that_is_away_or_frozen_fails_and_no_worker_is_waited_for(host, valkey):
    broker = valkey()
    durable = host(broker=guarded(broker.url))

    def look():
        return examine([check for check in of_celery.checks(durable, dict) if check.room == of_celery.BROKER_ROOM])

    broker.container.process.kill("SIGSTOP")
    frozen = look()
    broker.container.process.kill("SIGCONT")
    broker.container.process.kill("SIGKILL")
    gone = look()
    for made in (frozen, gone):
        (finding,) = made.findings
        assert is_mendable(finding, Reason.BROKER_UNREACHABLE, Status.FAIL)
        assert broker.container._password not in finding.fix
        assert made.skipped == {"broker_server": "broker failed", "workers": "broker failed"}


def test_no_worker_that_answers_fails_and_names_where_work_is_due(host, valkey):
    durable = host(broker=guarded(valkey().url))
    (finding,) = of_celery.workers(durable, lambda: {"mail": False})
    assert is_mendable(finding, Reason.NO_WORKER_ANSWERS, Status.FAIL)
    assert finding.observed.endswith("work is due on mail")

    def gone():
        raise OSError("no database")

    (finding,) = of_celery.workers(durable, gone)
    assert finding.observed.endswith("the database did not say where work is due")


def test_a_broker_that_goes_away_before_the_workers_are_asked_is_a_look_that_failed(host):
    durable = host(broker=guarded("redis://127.0.0.1:1/0"))
    made = examine([check for check in of_celery.checks(durable, dict) if check.name == "workers"])
    assert is_mendable(made.findings[0], Reason.COULD_NOT_LOOK, Status.FAIL)
    assert "the broker no longer answers" in made.findings[0].observed


def test_workers_that_may_not_be_asked_are_not(host):
    (finding,) = of_celery.workers(host(worker_enable_remote_control=False), dict)
    assert (finding.status, finding.observed[:9]) == (Status.PASS, "not asked")


# --- this process ---------------------------------------------------------------------------------------


def test_root_warns_and_so_does_what_lets_root_unpickle(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("C_FORCE_ROOT", "1")
    root, forced = process.root()
    assert is_mendable(root, Reason.RUNS_AS_ROOT, Status.WARN)
    assert is_mendable(forced, Reason.C_FORCE_ROOT, Status.WARN)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("C_FORCE_ROOT")
    assert [finding.status for finding in process.root()] == [Status.PASS]


def test_a_broker_that_nobody_named_is_told(host, monkeypatch, services):
    monkeypatch.delenv("DURABLE_REDIS_URL", raising=False)
    monkeypatch.setattr(environment, "DEFAULT_BROKER_URL", services.redis_url)
    assumed, *others = list(of_celery.broker(host(broker=environment.broker_url_from_environment())))
    assert is_mendable(assumed, Reason.BROKER_ASSUMED, Status.WARN)
    assert assumed.observed == f"DURABLE_REDIS_URL is not set, using {guarded(services.redis_url)}"
    assert [one.status for one in others] == [Status.PASS]


@pytest.mark.parametrize("how", ["by the variable", "by the app itself", "by Celery's own variable"])
def test_a_broker_that_somebody_named_is_not(host, monkeypatch, services, how):
    """Be it the very address that would be assumed."""
    monkeypatch.setattr(environment, "DEFAULT_BROKER_URL", services.redis_url)
    monkeypatch.delenv("DURABLE_REDIS_URL", raising=False)
    url = guarded(services.redis_url)
    if how == "by the variable":
        monkeypatch.setenv("DURABLE_REDIS_URL", services.redis_url)
        url = environment.broker_url_from_environment()
    if how == "by Celery's own variable":
        monkeypatch.setenv("CELERY_BROKER_URL", url)
        url = environment.broker_url_from_environment()
    assert [one.reason for one in of_celery.broker(host(broker=url))] == [Reason.OK]
