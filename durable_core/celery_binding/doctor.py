"""The checks that need the app: its settings, its beat entries, its broker, and which queues its workers read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from celery import Celery
from kombu import Connection

from durable_core import kinds
from durable_core.celery_binding.durable import Durable
from durable_core.celery_binding.environment import AssumedUrl
from durable_core.celery_binding.publish import QUEUE_PREFIX
from durable_core.celery_binding.readers import readers
from durable_core.celery_binding.settings import Settings
from durable_core.celery_binding.transport import guarded, is_guarded, register
from durable_core.database.environment import REDIS_VARIABLE
from durable_core.database.transactions import said
from durable_core.doctor.findings import Check, Finding, NotLookedAt, Reason, found, or_well, well
from durable_core.doctor.work import UNREAD_SECONDS, Installation
from durable_core.errors import DefinitionError
from durable_core.sweeps import CONTROL_QUEUE

SETTINGS_ROOM, BROKER_ROOM = "settings", "broker"
SCHEMA, LEASE = "durable_schema", "durable_lease_seconds"

BROKER_SECONDS = 2.0
INSPECT_SECONDS = 2.0
"""How long workers have to answer. One of the solo pool that is at work does not."""

SHORTEST_VISIBILITY = 60.0
NEARLY_FULL = 0.9

DueQueues = Callable[[], Mapping[str, bool]]
"""The queues in which work is due, and whether it is overdue there."""


def load(durable: Durable) -> None:
    """Load what a worker and a beat of this app load, and finalise it as they do. Raises what its modules raise."""
    durable.app.loader.import_default_modules()
    durable.app.finalize()


def installation(durable: Durable) -> Installation:
    """What this app declares, after `load`. A setting that cannot be used counts as its default."""
    known = list(kinds.deliveries)
    at_hand = usable(durable)
    return Installation(
        sweeps=at_hand.settings.sweeps(),
        kinds={name for kind in known for name in kind.names},
        periodic={kind.name for kind in known if kind.cadence is not None},
        steps={name for kind in kinds.plan_steps for name in kind.names},
        operations={name for kind in kinds.operations for name in kind.names},
        assumed=at_hand.instead_of("durable_sweep_intervals", "the interval is the default"),
    )


@dataclass(frozen=True)
class Usable:
    """The settings with those left out that cannot be used; and of each that was, why."""

    settings: Settings
    faults: Mapping[str, str]

    def instead_of(self, name: str, taken: str) -> str:
        """What is taken instead of this setting; empty where it can be used."""
        return f"{taken}, for {name} cannot be used" if name in self.faults else ""


class _Without:
    """A configuration without some of its settings; it remembers the last that was asked for."""

    def __init__(self, conf: Any, without: Collection[str]) -> None:
        self._conf, self._without, self.asked = conf, without, ""

    def get(self, name: str, default: Any = None) -> Any:
        self.asked = name
        return default if name in self._without else self._conf.get(name, default)


def usable(durable: Durable) -> Usable:
    """The settings, one after the other left out until the rest can be used: one that is wrong tells of no other."""
    faults: dict[str, str] = {}
    while True:
        conf: Any = _Without(durable.app.conf, faults)
        try:
            return Usable(Settings.of(cast(Celery, SimpleNamespace(conf=conf))), faults)
        except Exception as error:  # of a value that is not even of the right sort, whatever Python raises
            why = str(error) if isinstance(error, DefinitionError) else f"{conf.asked}: {type(error).__name__}: {error}"
            names = set(_SETTING.findall(why))
            if LEASE in names and conf.asked != LEASE:
                # Each is right, and they do not fit: nobody knows which is meant.
                names.add("durable_heartbeat_seconds")
            if names <= faults.keys():
                return Usable(Settings(), faults | {conf.asked: why})
            faults |= {name: why for name in names if name not in faults}


_SETTING = re.compile(r"durable_[a-z_]+")
"""A DefinitionError names its setting."""


def checks(durable: Durable, due_queues: DueQueues) -> list[Check]:
    return [
        Check("settings", SETTINGS_ROOM, lambda: settings(durable)),
        Check("modules", SETTINGS_ROOM, lambda: modules(durable), gate=True),
        Check("beat", SETTINGS_ROOM, lambda: beat(durable)),
        Check("celery", SETTINGS_ROOM, lambda: celery_settings(durable)),
        Check("broker", BROKER_ROOM, lambda: broker(durable), gate=True),
        Check("broker_server", BROKER_ROOM, lambda: broker_server(durable)),
        Check("workers", BROKER_ROOM, lambda: workers(durable, due_queues)),
    ]


def settings(durable: Durable) -> Iterator[Finding]:
    """Whether the `durable_` settings can be used."""
    at_hand = usable(durable)
    for why in dict.fromkeys(at_hand.faults.values()):
        instead = f'"{at_hand.settings.schema}" is looked at instead' if why == at_hand.faults.get(SCHEMA) else ""
        yield found(
            "settings", Reason.SETTINGS_INVALID, why.removesuffix("."),
            "correct that setting; no worker starts with it", assumed=instead,
        )  # fmt: skip
    if not at_hand.faults:
        yield well("settings", "the durable_ settings can be used")


def modules(durable: Durable) -> Iterator[Finding]:
    """Whether the modules that a worker loads can be loaded."""
    try:
        load(durable)
    except Exception as error:  # whatever the host's modules raise
        yield found(
            "modules", Reason.MODULES_NOT_LOADED, f"{type(error).__name__}: {error}",
            "mend that import; a worker of this app does not start",
        )  # fmt: skip
    else:
        yield well("modules", f"{len(list(kinds.known()))} kinds are declared")


def beat(durable: Durable) -> Iterator[Finding]:
    """Whether a beat of this app drives the sweeps: an assignment of `beat_schedule` after `finalize` drops ours."""
    at_hand = usable(durable)
    if at_hand.faults:
        raise NotLookedAt("settings failed")  # with such settings ours are never added
    schedule: Mapping[str, Any] = durable.app.conf.beat_schedule or {}
    entries = {_of(entry, "task"): entry for entry in schedule.values()}
    wanted = [sweep.task for sweep in at_hand.settings.sweeps()]
    missing = [task for task in wanted if task not in entries]
    if missing and not at_hand.settings.beat:
        yield well("beat", "durable_beat is off: the age of the sweeps tells whether something else drives them")
        return
    if missing:
        yield found(
            "beat", Reason.BEAT_ENTRY_MISSING, f"no beat entry for {', '.join(missing)}",
            "set beat_schedule before the app is finalised, or add to it: "
            "app.conf.beat_schedule.update(install(app).beat_schedule())",
        )  # fmt: skip
    elsewhere = {
        task: queue
        for task in wanted
        if task in entries and (queue := (_of(entries[task], "options") or {}).get("queue")) != CONTROL_QUEUE
    }
    for task, queue in elsewhere.items():
        yield found(
            "beat", Reason.BEAT_ENTRY_ELSEWHERE, f"the beat entry of {task} goes to {queue or 'the default queue'}",
            f'give it options={{"queue": "{CONTROL_QUEUE}"}}: a backlog elsewhere would starve the rescue',
        )  # fmt: skip
    if not missing and not elsewhere:
        yield well("beat", f"{len(wanted)} entries drive the sweeps")


def _kinds() -> list[Any]:
    """What is declared, of every contract: each has a time limit."""
    return list(kinds.known())


def _of(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name, None)


def celery_settings(durable: Durable) -> list[Finding]:
    """Celery's own settings that make ours late, or doubled, or unsafe."""
    return or_well(
        _of_celery(durable.app.conf),
        "celery",
        "prefetch, acknowledgement, visibility and time-outs are as they should be",
    )


def _of_celery(conf: Any) -> Iterator[Finding]:
    options = conf.broker_transport_options or {}
    if conf.worker_prefetch_multiplier != 1:
        yield found(
            "celery", Reason.PREFETCH_HOARDS,
            f"worker_prefetch_multiplier is {conf.worker_prefetch_multiplier}: short work waits behind long, while "
            "other workers idle",
            "worker_prefetch_multiplier = 1",
        )  # fmt: skip
    if conf.task_acks_late:
        yield found(
            "celery", Reason.LATE_ACKS,
            "task_acks_late is on for every task: one in flight when Redis restarts can end its worker",
            "task_acks_late = False, and acks_late=True on those of your tasks that need it",
        )  # fmt: skip
    visibility = options.get("visibility_timeout")
    longest = max((kind.timeout for kind in _kinds()), default=0.0)
    if visibility is not None and visibility < max(SHORTEST_VISIBILITY, longest):
        yield found(
            "celery", Reason.VISIBILITY_SHORT,
            f"visibility_timeout is {visibility:g} s, and work may take longer: Redis hands out what a worker holds",
            'broker_transport_options = {"visibility_timeout": 3600, …}',
        )  # fmt: skip
    if {"pickle", "application/x-python-serialize"} & set(conf.accept_content or ()):
        yield found(
            "celery", Reason.ACCEPTS_PICKLE,
            "accept_content allows pickle: whoever can write to the broker runs code here",
            'accept_content = ["json"]',
        )  # fmt: skip
    if not options.get("socket_timeout"):
        yield found(
            "celery", Reason.BROKER_UNBOUNDED,
            "no socket_timeout: a worker whose broker stops answering waits for ever",
            'broker_transport_options = {"socket_timeout": 10, "socket_connect_timeout": 5, …}',
        )  # fmt: skip


def broker(durable: Durable) -> Iterator[Finding]:
    """Whether the broker answers, through the guard; and whether anybody said where it is."""
    url = durable.app.conf.broker_read_url
    if isinstance(url, AssumedUrl):
        yield found(
            "broker", Reason.BROKER_ASSUMED, f"{REDIS_VARIABLE} is not set, using {url}",
            f"set {REDIS_VARIABLE} for the app, its workers and its beat; to that address, if it is meant",
        )  # fmt: skip
    yield from answers(bounded(durable))


def answers(broker: Connection) -> Iterator[Finding]:
    """The same of a connection that is not open yet."""
    with broker as connection:
        transport: Any = connection.transport
        try:
            connection.connect()
            if transport.driver_type == "redis":
                channel: Any = connection.default_channel
                channel.client.ping()
        except (*transport.connection_errors, OSError) as error:
            yield found(
                "broker", Reason.BROKER_UNREACHABLE, f"the broker does not answer: {said(error)}",
                f"see that {connection.as_uri()} runs and takes this user and password; nothing is lost meanwhile, and "
                "work goes on when it is back",
            )  # fmt: skip
            return
        if transport.driver_type != "redis":
            yield found(
                "broker", Reason.BROKER_NOT_REDIS, f"the broker is {transport.driver_type}",
                "use Redis or Valkey: nothing else is tested",
            )  # fmt: skip
        elif not is_guarded(transport):
            yield found(
                "broker", Reason.BROKER_UNGUARDED, "one damaged message in the broker can stop every worker",
                "broker_url = durable_core.celery_binding.transport.guarded(…), which makes redis:// durable-redis://",
            )  # fmt: skip
        else:
            yield well("broker", "it answers, behind the guard")


def broker_server(durable: Durable) -> list[Finding]:
    """Whether it keeps what it is given."""
    with bounded(durable) as connection:
        transport: Any = connection.transport
        if transport.driver_type != "redis":
            return [well("broker_server", "not looked at: it is no Redis")]
        channel: Any = connection.default_channel
        parts = [channel.client.info(part) for part in ("memory", "replication", "persistence")]
    facts = {name: value for part in parts for name, value in part.items()}
    kept = "appends to a file" if facts.get("aof_enabled") else "may lose its hints in a crash, which costs time alone"
    policy = facts.get("maxmemory_policy", "noeviction")
    return or_well(_of_redis(facts, policy), "broker_server", f"a primary, {policy}; it {kept}")


def _of_redis(facts: Mapping[str, Any], policy: str) -> Iterator[Finding]:
    if facts.get("role") not in (None, "master"):
        yield found(
            "broker_server", Reason.BROKER_IS_REPLICA, "the broker is a replica: it takes no messages",
            "name the primary in broker_url, or use durable-sentinel://",
        )  # fmt: skip
    if policy != "noeviction":
        yield found(
            "broker_server", Reason.BROKER_EVICTS,
            f"maxmemory-policy is {policy}: a full broker throws queues away, those of your other tasks too",
            "CONFIG SET maxmemory-policy noeviction, and the same in its configuration",
        )  # fmt: skip
    limit, used = int(facts.get("maxmemory") or 0), int(facts.get("used_memory") or 0)
    if limit and used > NEARLY_FULL * limit:
        yield found(
            "broker_server", Reason.BROKER_NEARLY_FULL, f"it uses {used / limit:.0%} of its maxmemory",
            "raise maxmemory, or find what fills it: MEMORY STATS",
        )  # fmt: skip


_BOUNDS: dict[str, Any] = {
    "connect_timeout": BROKER_SECONDS,
    "transport_options": {
        "socket_timeout": BROKER_SECONDS,
        "socket_connect_timeout": BROKER_SECONDS,
        "retry_on_timeout": False,
        "max_retries": 0,
    },
}


def bounded(durable: Durable) -> Connection:
    """A connection to the app's broker, not open yet, that waits for nothing longer than BROKER_SECONDS."""
    app: Any = durable.app
    connection: Connection = app.connection_for_read(**_BOUNDS)
    return connection


def bounded_at(url: str) -> Connection:
    """The same to the Redis of this address, behind the guard."""
    register()
    return Connection(guarded(url), **_BOUNDS)


def lying(broker: Connection, queues: Iterable[str]) -> dict[str, int]:
    """How many messages lie in each of these queues. Raises what the broker raises."""
    with broker as connection:
        channel: Any = connection.default_channel
        return {queue: channel.queue_declare(queue=queue, durable=True).message_count for queue in queues}


def workers(durable: Durable, due_queues: DueQueues) -> Iterator[Finding]:
    """Which queues somebody reads, by the workers' own account."""
    if not durable.app.conf.worker_enable_remote_control:
        yield well("workers", "not asked: worker_enable_remote_control is off, so who reads what is not known")
        return
    due, unknown = _due(due_queues)
    answers = readers(durable.app, seconds=INSPECT_SECONDS)
    if answers is None:
        raise ConnectionError("the broker no longer answers")
    if not answers:
        yield found(
            "workers", Reason.NO_WORKER_ANSWERS,
            f"no worker answered within {INSPECT_SECONDS:g} s{f'; work is due on {_list(due)}' if due else unknown}",
            "start one: celery -A … worker; one of the solo pool that is at work does not answer: ask again",
        )  # fmt: skip
        return
    read = set().union(*answers.values())
    yield from or_well(_unread(read, due), "workers", f"{len(answers)} answered, and every queue that matters is read")


def _due(due_queues: DueQueues) -> tuple[Mapping[str, bool], str]:
    """The queues in which work is due; or none, and a remark that nobody knows them."""
    try:
        return due_queues(), ""
    except Exception:  # the checks of the database say why
        return {}, "; the database did not say where work is due"


def _unread(read: set[str], due: Mapping[str, bool]) -> Iterator[Finding]:
    """Of the durable queues, those that matter and that nobody reads."""
    if CONTROL_QUEUE.removeprefix(QUEUE_PREFIX) not in read:
        yield found(
            "workers", Reason.CONTROL_UNREAD, f"no worker reads {CONTROL_QUEUE}: no sweep runs but to the rescue",
            f"celery -A … worker -Q {CONTROL_QUEUE}",
        )  # fmt: skip
    for queue in sorted(queue for queue, overdue in due.items() if overdue and queue not in read):
        yield found(
            "workers", Reason.QUEUE_UNREAD,
            f"work is due on queue {queue} for more than {UNREAD_SECONDS:g} s, and no worker that answered reads it",
            f"celery -A … worker -Q {QUEUE_PREFIX}{queue}",
        )  # fmt: skip
    for queue in sorted(queue for queue, overdue in due.items() if not overdue and queue not in read):
        yield found(
            "workers", Reason.QUEUE_UNREAD_IDLE,
            f"work is due on queue {queue}, new or paused or held, and no worker that answered reads it",
            f"celery -A … worker -Q {QUEUE_PREFIX}{queue}, unless one is starting or its pause means that",
        )  # fmt: skip
    for queue in sorted({kind.queue for kind in kinds.known()} - due.keys() - read):
        yield found(
            "workers", Reason.QUEUE_UNREAD_IDLE, f"kinds are declared for queue {queue}, which nobody reads",
            f"celery -A … worker -Q {QUEUE_PREFIX}{queue}, before work comes",
        )  # fmt: skip


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
