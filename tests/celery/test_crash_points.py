"""
A worker may be lost at any point: killed there, or frozen there past its lease and continued.

| point | where the process is | how it is held there |
| --- | --- | --- |
| K0 | the caller has inserted, not committed | its own session's event |
| K1 | the caller has committed, no hint is out | its own session's event |
| K2 | the hint is taken, nothing is claimed | Celery's `task_prerun` |
| K3 | the claim is sent, not committed | trigger |
| K4 | the claim is committed, its answer unheard | relay |
| K5 | claimed, the handler not begun | the line `delivery_claimed` |
| K6 | in the handler, before the external call | the handler |
| K7 | the other side has answered, the handler not returned | the handler |
| K8 | the handler has returned, the commit not begun | the line `result_not_stored` |
| K9 | the row locked, no effect written | trigger |
| K10 | the effect written, no receipt | trigger |
| K11 | receipt and follow-up work written, no COMMIT sent | trigger |
| K12 | COMMIT sent, and never comes about: lost on its way, or with the database's own session | relay, trigger |
| K13 | COMMIT sent, and stands: its answer lost, or still to come when the lease is over | relay, trigger |
| K14 | committed, the follow-up's hint not out | the host's own event after commit |
| K15 | the failure reported, not committed: comes about, or does not | trigger |
| K16 | the heartbeat alone has died | the handler |
| K17 | the reaper has taken rows back, not committed; or committed and done nothing else | trigger |
| K18 | what is killed: a child, the main process, the whole group | |

K2 to K15 are held at once, in one worker with a child for each, and all of them are frozen together and continued, or
killed together, as K18 says. Its lease is long, so that nothing hurries; a loss makes it end at once.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from durable_core.claims.journal import Line
from durable_core.deliveries.read import Delivery
from tests.celery.conftest import Nodes
from tests.celery.nodes import REPOSITORY, ControlWorker, Process, ShopSetup, ShopWorker, wait_until
from tests.celery.points import Held, HoldingRelay, Locks, triggers
from tests.celery.shop import Shop
from tests.celery.world import FINISHED, PATIENCE, Effect, Execution, World
from tests.sinks import Receiver, http_server

QUEUE = "points"
VICTIMS_LEASE = 60.0
"""
So many children on a busy machine may be late with their heartbeats; and a worker waits a third of its lease for an
answer of its database, which the test holds back.
"""


# --- what each point comes to ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Came:
    """What a delivery has come to: the fence that settled it, the fences of its external calls, what was counted."""

    fence: int
    called: tuple[int, ...]
    interruptions: int = 0
    failures: int = 0
    refused: bool = False
    """Whether the first owner, back from its freeze, tried to write."""


def once(*called: int, refused: bool = False) -> Came:
    """Done by the first claim; whatever happened cost the row nothing."""
    return Came(1, called or (1,), refused=refused)


def again(*called: int, refused: bool = False) -> Came:
    """The first claim was lost and counted as one interruption; the second did the work."""
    return Came(2, called, interruptions=1, refused=refused)


def failed(*called: int) -> Came:
    """The first claim ended with a failure, which was recorded; the second did the work."""
    return Came(2, called, failures=1)


@dataclass(frozen=True)
class Point:
    """What a point comes to when the process is killed there, and when it is frozen there past its lease."""

    killed: Came
    frozen: Came


POINTS = {
    "K2": Point(once(), once()),
    "K3": Point(once(), once()),
    "K3 claimed late": Point(again(2), again(2, 1, refused=True)),
    "K4": Point(again(2), again(2, 1, refused=True)),
    "K5": Point(again(2), again(2, 1, refused=True)),
    "K6": Point(again(2), again(2, 1, refused=True)),
    "K7": Point(again(1, 2), again(1, 2, refused=True)),
    "K8": Point(again(1, 2), again(1, 2, refused=True)),
    # Frozen with the row's lock in hand: nobody can take the row, so the commit is right however late it comes.
    "K9": Point(again(1, 2), once()),
    "K10": Point(again(1, 2), once()),
    "K11": Point(again(1, 2), once()),
    "K12": Point(again(1, 2), again(1, 2, refused=True)),
    "K12 waits": Point(again(1, 2), again(1, 2, refused=True)),
    "K13": Point(once(), once()),
    "K13 waits": Point(once(), once()),
    "K14": Point(once(), once()),
    "K15": Point(failed(1, 2), failed(1, 2)),
    "K15 undone": Point(again(1, 2), again(1, 2, refused=True)),
}

KINDS_OF_LOSS = {
    "frozen": tuple(POINTS),
    "killed": tuple(POINTS),
    "killed with its main process": ("K4", "K7", "K10", "K12", "K13 waits", "K15"),
    "killed with its whole group": ("K4", "K7", "K10", "K12", "K13 waits", "K15"),
}


def cases(*points: str, losses: Iterable[str] = KINDS_OF_LOSS) -> pytest.MarkDecorator:
    """Each of these points with each of these losses, where it is one of its points."""
    return pytest.mark.parametrize(
        ("point", "loss"),
        [
            pytest.param(point, loss, id=f"{point} {loss}")
            for loss in losses
            for point in KINDS_OF_LOSS[loss]
            if point in points
        ],
    )


BY_GATE = ("K5", "K6", "K7", "K8", "K14")
LOCKS = {
    "K3": "K3", "K3 claimed late": "K3", "K9": "K9", "K10": "K10", "K11": "K11",
    "K12 waits": "COMMIT", "K13 waits": "COMMIT", "K15": "K15", "K15 undone": "K15",
}  # fmt: skip
"""The triggers in which the others wait, and those that the relay holds: the words, and whether they arrive."""
COMMIT = b"COMMIT\0"
"""The statement; the word alone is in a comment of another."""
BY_RELAY = {"K4": (b"", True), "K12": (COMMIT, False), "K13": (COMMIT, True)}
HEARD_OF = {"K4": "processing", "K13": "sent"}
"""What the row says as soon as the message has arrived whose answer is held."""
CLAIMING = ("K3", "K3 claimed late", "K4")
SETTLING = ("K12", "K12 waits", "K13", "K13 waits", "K15", "K15 undone")
"""Held in a statement of the worker's own, whose answer it does not await for ever."""
UNDONE = ("K3", "K12 waits", "K15 undone")
"""Whose session in the database ends with the process, as when a host is lost."""
KEPT = ("K9", "K10", "K11")
"""Frozen with the row's lock in hand."""


# --- one worker, all points ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lasting_world(request: pytest.FixtureRequest, celery_setup: ShopSetup) -> Iterator[World]:
    """As `world`, for a whole module."""
    world = World(
        request.getfixturevalue("shop_engine"),
        request.getfixturevalue("gates"),
        celery_setup.app,
        request.getfixturevalue("durable"),
        request.getfixturevalue("celery_broker"),
    )
    yield world
    world.clean_up()


@pytest.fixture(scope="module")
def locks(lasting_world: World) -> Iterator[Locks]:
    with triggers(lasting_world.engine) as locks:
        yield locks


@pytest.fixture(scope="module")
def relay(lasting_world: World) -> Iterator[HoldingRelay]:
    url = lasting_world.engine.url
    relay = HoldingRelay(url.host or "", url.port or 5432)
    yield relay
    relay.close()


def through(relay: HoldingRelay, world: World) -> str:
    """
    The database's address by way of the relay.

    A statement that was sent goes on although its client is dead, until the test lets it: else the server would look
    for the client every two seconds, and who is slower than that would see another loss than the one of its point.
    """
    url = world.engine.url.set(host="127.0.0.1", port=relay.port)
    patient = url.update_query_dict({"options": "-c client_connection_check_interval=0"})
    return patient.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def victim(
    lasting_world: World, shop_kinds: Shop, lasting_nodes: Nodes, locks: Locks, relay: HoldingRelay
) -> Iterator[ShopWorker]:
    """A worker on a queue of its own, with a child for each point and the relay between it and its database."""
    worker = lasting_nodes.worker(
        "victim", "-Q", f"durable.{QUEUE}", "-c", str(len(POINTS)),
        environment={
            "SHOP_POINTS": "1",
            "SHOP_LEASE": str(VICTIMS_LEASE),
            "SHOP_HEARTBEAT": str(VICTIMS_LEASE / 6),
            "SHOP_DATABASE_URL": through(relay, lasting_world),
        },
    )  # fmt: skip
    worker.ready()
    # Every child has begun its work once, so that none is late for its point.
    warm = [lasting_world.commit(shop_kinds.held, "claimed", queue=QUEUE) for _ in POINTS]
    pids = {lasting_world.held_at(row_id) for row_id in warm}
    assert pids == worker.children()
    for row_id in warm:
        lasting_world.open(row_id)
    lasting_world.finished(*warm)
    yield worker
    worker.teardown()


@pytest.fixture(scope="module")
def sink() -> Iterator[Receiver]:
    with http_server() as receiver:
        yield receiver


@dataclass
class Seen:
    """What a delivery came to, read after all had ended."""

    row: Delivery
    lines: list[Line]
    executions: list[Execution]
    effects: list[Effect]
    follow_up: str | None


@dataclass
class Lost:
    """One kill or freeze of a process at each of its points, and what became of every one."""

    how: str
    ids: dict[str, str] = field(default_factory=dict)
    hit_at: datetime | None = None
    as_done: dict[str, Delivery] = field(default_factory=dict)
    """The rows as others had finished them, before a frozen process was continued."""
    at: dict[str, Seen] = field(default_factory=dict)
    log: str = ""

    @property
    def frozen(self) -> bool:
        return self.how == "frozen"

    @property
    def booked(self) -> set[tuple[str, str | None]]:
        """How the loss may be booked: a parent sees a dead child, nobody sees a dead parent, so its leases lapse."""
        lapsed: tuple[str, str | None] = ("reap", "CLAIM_EXPIRED")
        return {lapsed, ("release", "CHILD_LOST")} if self.how == "killed" else {lapsed}


class Scene:
    """Points, each held in its own child of the victim; then they are let go, cut or ended."""

    def __init__(
        self, world: World, kinds: Shop, victim: ShopWorker, locks: Locks, relay: HoldingRelay, sink: Receiver,
        queue: str = QUEUE,
    ) -> None:  # fmt: skip
        self.world, self.kinds, self.victim, self.queue = world, kinds, victim, queue
        self.locks, self.relay, self.sink = locks, relay, sink
        self.ids: dict[str, str] = {}
        self.messages: dict[str, Held] = {}

    def hold(self, points: Iterable[str]) -> None:
        """Everybody to their places: those whose database's answer is waited for, and not for long, go last."""
        for point in points:
            self.prepare(point, pauses=(point, "settle") if point in SETTLING else (point,))
        claiming = [point for point in self.ids if point in CLAIMING]
        settling = [point for point in self.ids if point in SETTLING]
        early = [point for point in self.ids if point not in (*CLAIMING, "K2")]
        self.make_due(*early)
        for point in early:
            if point in settling:
                self.world.held_at(f"{self.ids[point]}.settle")
            else:
                self._held(point)
        self.make_due(*claiming)
        for point in settling:
            self.world.open(f"{self.ids[point]}.settle")
        for point in (*claiming, *settling):
            self._held(point)
        if "K2" in self.ids:
            # Its row stays due and is hinted again and again; but now every other child has its point.
            self.make_due("K2")
            self._held("K2")

    def prepare(self, point: str, pauses: Iterable[str] = ()) -> None:
        url = self.sink.url if point == "K7" else ""
        row_id = self.ids[point] = self.world.prepare(self.kinds.point, point, url, queue=self.queue)
        for pause in pauses:
            (self.world.gates / f"{row_id}.{pause}.asked").touch()
        if lock := LOCKS.get(point):
            self.locks.hold(lock, row_id)
        if point in BY_RELAY:
            words, arrives = BY_RELAY[point]
            self.messages[point] = self.relay.hold(row_id, words, arrives=arrives)

    def make_due(self, *points: str) -> None:
        self.world.make_due(*(self.ids[point] for point in points))
        for point in points:
            self.world.send("shop.point", self.ids[point], queue=self.queue)

    def _held(self, point: str) -> None:
        row_id = self.ids[point]
        if point in LOCKS:
            wait_until(lambda: self.locks.waiting(LOCKS[point], row_id), f"the database holds {point}")
        elif point in BY_RELAY:
            wait_until(self.messages[point].reached.is_set, f"the relay holds {point}")
            if (state := HEARD_OF.get(point)) is not None:
                wait_until(lambda: self.world.row(row_id).state == state, f"{point} is done, and unheard")
        else:
            self.world.held_at(f"{row_id}.{point}")

    def release(self, *points: str) -> None:
        """What the database and the relay still hold goes its way: on, or to its end."""
        for point in points:
            if point in UNDONE:
                self.locks.end_waiting(LOCKS[point], self.ids[point])
            elif point in LOCKS:
                self.locks.let_go(LOCKS[point], self.ids[point])
            elif point in BY_RELAY:
                self.messages[point].cut()

    def give_up(self) -> None:
        """End what is held, whatever it is, and leave a worker with nothing to do."""
        pids = self.victim.children()
        self.victim.kill("SIGKILL")
        for gate in self.world.gates.glob("*.asked"):
            gate.unlink()
        for point, row_id in self.ids.items():
            if point in LOCKS:
                self.locks.let_go(LOCKS[point], row_id)
            elif point in BY_RELAY:
                self.messages[point].cut()
        self.make_due(*(point for point in self.ids if self.world.row(self.ids[point]).state == "pending"))
        self.victim.start()
        self.victim.ready()
        self.ended(self.ids, lapsed=pids)

    def ended(self, points: Iterable[str], *, lapsed: Collection[int]) -> None:
        """Return when these deliveries have ended; what the lost processes still hold has no lease any more."""

        def all_ended() -> bool:
            self.world.lapse(self.queue, lapsed)
            return all(self.world.row(self.ids[point]).state in FINISHED for point in points)

        wait_until(all_ended, "the deliveries of the lost process end", seconds=PATIENCE, every=0.3)

    def seen(self, point: str) -> Seen:
        row_id = self.ids[point]
        return Seen(
            self.world.row(row_id),
            self.world.lines(row_id),
            self.world.executions(row_id),
            self.world.effects(row_id),
            self.world.keyed(f"after {row_id}"),
        )


class Losses:
    """Each kind of loss, brought about when a test first asks what became of it."""

    def __init__(self, scene: Callable[[], Scene], others: ShopWorker) -> None:
        self._scene, self._others = scene, others
        self._known: dict[str, Lost] = {}
        self._tried: set[str] = set()

    def of(self, how: str) -> Lost:
        if how not in self._known:
            assert how not in self._tried, f"the process could not be {how}; see the first test that says so"
            self._tried.add(how)
            self._known[how] = self._bring_about(how)
        return self._known[how]

    def _bring_about(self, how: str) -> Lost:
        scene, lost = self._held(KINDS_OF_LOSS[how]), Lost(how)
        lost.ids = scene.ids
        lost.hit_at = scene.world.now()
        if lost.frozen:
            freeze(lost, scene, self._others)
        else:
            kill(lost, scene)
        lost.at = {point: scene.seen(point) for point in scene.ids}
        lost.log = scene.victim.logs()
        return lost

    def _held(self, points: Collection[str]) -> Scene:
        """A scene with all in place; one that did not come about on a busy machine is made anew, once."""
        scene = self._scene()
        try:
            scene.hold(points)
        except AssertionError:
            scene.give_up()
            scene = self._scene()
            scene.hold(points)
        return scene


@pytest.fixture(scope="module")
def losses(
    lasting_world: World,
    shop_kinds: Shop,
    victim: ShopWorker,
    celery_worker: ShopWorker,
    locks: Locks,
    relay: HoldingRelay,
    sink: Receiver,
) -> Losses:
    return Losses(lambda: Scene(lasting_world, shop_kinds, victim, locks, relay, sink), celery_worker)


@pytest.fixture
def lost(losses: Losses, loss: str) -> Lost:
    """All points held, then the loss, then the rescue: every delivery has ended."""
    return losses.of(loss)


def kill(lost: Lost, scene: Scene) -> None:
    victim, world, ids = scene.victim, scene.world, scene.ids
    pids = victim.children()
    match lost.how:
        case "killed":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        case "killed with its main process":
            victim.process.kill_leader()
        case "killed with its whole group":
            victim.kill("SIGKILL")
    scene.release(*ids)
    if lost.how == "killed":
        # The parent lives, and its leases run for long yet.
        wait_until(lambda: world.lines(ids["K6"]), "the parent gives back what a dead child held")
    else:
        victim.start()
        victim.ready()
    scene.ended(ids, lapsed=pids)
    world.accounted(*ids.values())


def freeze(lost: Lost, scene: Scene, others: ShopWorker) -> None:
    victim, world, ids = scene.victim, scene.world, scene.ids
    pids = victim.children()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    others.also_reads(QUEUE)
    # The database and the network go on while the process stands still. What has the row's lock keeps it.
    scene.release(*(point for point in ids if point != "K4"))
    taken = [point for point in ids if point not in KEPT]
    scene.ended(taken, lapsed=pids)
    lost.as_done.update((point, world.row(ids[point])) for point in taken)
    for point in KEPT:
        away = world.row(ids[point])
        assert (away.state, away.fence) == ("processing", 1)

    scene.messages["K4"].go_on()
    for point in ("K2", *BY_GATE):
        world.open(f"{ids[point]}.{point}")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    world.accounted(*ids.values())
    for point, row_id in ids.items():
        if POINTS[point].frozen.refused:
            world.journalled(row_id, "refused")
    inspect = world.app.control.inspect([victim.hostname()], timeout=5)
    wait_until(lambda: (inspect.active() or {}).get(victim.hostname()) == [], "the victim has nothing left to do")
    others.reads_no_more(QUEUE)


# --- K2 to K15, killed and frozen ------------------------------------------------------------------------


@cases(*POINTS)
def test_wherever_it_is_lost_its_effect_is_there_once_and_the_books_agree(lost: Lost, point: str) -> None:
    seen = lost.at[point]
    row, came = seen.row, POINTS[point].frozen if lost.frozen else POINTS[point].killed

    assert (row.state, row.fence, row.settled_fence) == ("sent", came.fence, came.fence)
    assert (row.attempts, row.interruptions, row.failures) == (came.fence, came.interruptions, came.failures)
    assert (row.shutdowns, row.snoozes) == (0, 0)
    assert [effect.fence for effect in seen.effects] == [came.fence]
    assert [execution.fence for execution in seen.executions] == list(came.called)
    assert {execution.key for execution in seen.executions} == {f"shop.point:{row.id}"}
    moves = [(line.move, line.reason) for line in seen.lines if line.move != "refused"]
    if came.interruptions:
        assert len(moves) == 1
        assert moves[0] in lost.booked
    else:
        assert [move for move, _ in moves] == ["fail"] * came.failures
    assert [line.move for line in seen.lines].count("refused") == int(lost.frozen and came.refused)


@pytest.mark.spec("deliveries", 15)
@cases("K5", "K6", losses=["killed"])
def test_killed_after_its_claim_and_before_the_call_the_call_is_made_once(lost: Lost, point: str) -> None:
    (made,) = lost.at[point].executions

    assert (made.fence, made.attempt) == (2, 1), "a lost worker costs no attempt of the budget"


@pytest.mark.spec("deliveries", 16)
@cases("K7")
def test_lost_after_the_call_it_calls_again_with_the_same_key_once_and_never_in_parallel(
    lost: Lost, point: str, sink: Receiver
) -> None:
    seen = lost.at[point]
    first, second = seen.executions

    keys = [call.headers["idempotency-key"] for call in sink.calls]
    assert [key for key in keys if seen.row.id in key] == [f"shop.point:{seen.row.id}"] * 2
    assert first.attempt == second.attempt == 1
    assert lost.hit_at is not None
    assert first.at < lost.hit_at < second.at
    assert first.pid != second.pid


@pytest.mark.field("R79")
@cases("K11", "K14")
def test_follow_up_work_is_there_once_and_runs_without_its_hint(lost: Lost, point: str, lasting_world: World) -> None:
    """Committed with the effect or not at all; and dispatch finds it, whoever was to publish its hint."""
    follow_up = lost.at[point].follow_up
    assert follow_up is not None

    (row,) = lasting_world.accounted(follow_up)
    assert (row.fence, row.attempts) == (1, 1)


@pytest.mark.parametrize("loss", KINDS_OF_LOSS)
def test_no_lock_and_no_open_transaction_is_left_behind(lost: Lost, lasting_world: World) -> None:
    wait_until(lambda: lasting_world.holding() == [], "nobody holds anything")


REFUSED = [point for point, came in POINTS.items() if came.frozen.refused]


@cases(*REFUSED, losses=["frozen"])
def test_back_from_its_freeze_it_changes_nothing_and_one_line_tells_that_it_tried(lost: Lost, point: str) -> None:
    seen = lost.at[point]

    # Not one field of the row is the old owner's.
    assert seen.row == lost.as_done[point]
    (refused,) = [line for line in seen.lines if line.move == "refused"]
    assert (refused.fence, refused.from_state, refused.to_state) == (1, "sent", "sent")
    assert refused.facts is not None
    assert refused.facts["current_fence"] == 2
    assert lost.log.count("stale_write_refused") >= len(REFUSED)


@cases("K2", "K3", "K13", "K13 waits", "K15", losses=["frozen"])
def test_back_from_its_freeze_it_finds_that_all_was_done(lost: Lost, point: str) -> None:
    assert lost.at[point].row == lost.as_done[point]


# --- K0, K1: the caller -----------------------------------------------------------------------------------


class Caller:
    """A producer that is held before its COMMIT, or after it and before its hint."""

    def __init__(self, point: str, world: World, folder: Path, environment: dict[str, str]) -> None:
        self.key, self._world = f"{point} {uuid.uuid4()}", world
        self.process = Process(
            f"producer-{self.key}",
            [sys.executable, "-m", "tests.celery.producer", point, self.key],
            folder,
            {
                **os.environ,
                **environment,
                "CELERY_BROKER_URL": world.broker.url,
                "PYTHONPATH": str(REPOSITORY),
            },
        )

    def held(self) -> None:
        self._world.held_at(self.key)

    @property
    def row_id(self) -> str | None:
        return self._world.keyed(self.key)

    def thaw(self) -> None:
        self._world.open(self.key)
        self.process.kill(signal.SIGCONT)
        assert self.process.wait(60) == 0, self.process.logs()


@pytest.fixture(scope="module")
def callers(
    lasting_world: World, shop_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Caller]]:
    """Each of them killed, or frozen; the kill comes right at the point."""
    folder = tmp_path_factory.mktemp("callers")
    callers = {
        f"{point} {fate}": Caller(point, lasting_world, folder, shop_environment)
        for point in ("K0", "K1")
        for fate in ("killed", "frozen")
    }
    for name, caller in callers.items():
        caller.held()
        caller.process.kill(signal.SIGKILL if "killed" in name else signal.SIGSTOP)
    yield callers
    for caller in callers.values():
        caller.process.remove()


@pytest.mark.parametrize("caller", ["K0 killed"])
def test_a_caller_killed_before_its_commit_leaves_nothing(
    callers: dict[str, Caller], caller: str, lasting_world: World
) -> None:
    # The frozen one still has its transaction open.
    wait_until(lambda: len(lasting_world.holding()) <= 1, "the killed one's transaction has ended")

    assert callers[caller].row_id is None


@pytest.mark.parametrize("caller", ["K0 frozen"])
def test_a_caller_frozen_before_its_commit_has_enqueued_nothing_until_it_commits(
    callers: dict[str, Caller], caller: str, lasting_world: World
) -> None:
    frozen_since = lasting_world.now()
    wait_until(lambda: lasting_world.sweeps_since(frozen_since, "dispatch"), "dispatch has looked")
    assert callers[caller].row_id is None

    callers[caller].thaw()

    assert callers[caller].row_id is not None
    (row,) = lasting_world.accounted(callers[caller].row_id)
    assert (row.fence, len(lasting_world.executions(row.id))) == (1, 1)


@pytest.mark.field("R43")
@pytest.mark.parametrize("caller", ["K1 killed"])
def test_a_caller_killed_between_its_commit_and_its_hint_is_carried_out_by_the_next_dispatch(
    callers: dict[str, Caller], caller: str, lasting_world: World
) -> None:
    assert callers[caller].row_id is not None
    (row,) = lasting_world.accounted(callers[caller].row_id)

    assert (row.fence, len(lasting_world.executions(row.id))) == (1, 1)
    assert row.claimed_at is not None
    # A second is what is promised.
    assert row.claimed_at - row.created_at < timedelta(seconds=3)


@pytest.mark.parametrize("caller", ["K1 frozen"])
def test_a_caller_frozen_between_its_commit_and_its_hint_doubles_nothing_with_it(
    callers: dict[str, Caller], caller: str, lasting_world: World, shop_kinds: Shop
) -> None:
    row_id = callers[caller].row_id
    assert row_id is not None
    (before,) = lasting_world.accounted(row_id)

    callers[caller].thaw()
    lasting_world.accounted(lasting_world.commit(shop_kinds.order))

    assert lasting_world.row(row_id) == before
    assert [execution.fence for execution in lasting_world.executions(row_id)] == [1]


# --- K18: what is killed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("killed", id="K18 child"),
        pytest.param("killed with its main process", id="K18 main process"),
        pytest.param("killed with its whole group", id="K18 whole group"),
    ],
)
def test_a_loss_counts_once_whoever_sees_it(lost: Lost) -> None:
    """The parent and the reaper may both see a dead child; nobody but the reaper sees a dead parent."""
    lines = [line for seen in lost.at.values() for line in seen.lines if line.move in ("reap", "release")]
    counted = sum(seen.row.interruptions for seen in lost.at.values())

    assert len(lines) == counted == sum(POINTS[point].killed.interruptions for point in lost.at)
    assert {(line.move, line.reason) for line in lines} <= lost.booked
    if lost.how == "killed":
        assert lost.at["K6"].lines[0].reason == "CHILD_LOST", "the parent waits for no lease"


# --- a process that lives on ------------------------------------------------------------------------------


FEW = "few"


@pytest.fixture(scope="module")
def few(lasting_world: World, lasting_nodes: Nodes, locks: Locks, relay: HoldingRelay) -> Iterator[ShopWorker]:
    """A worker with the shop's own lease, a few children, and the relay before its database."""
    worker = lasting_nodes.worker(
        "few", "-Q", f"durable.{FEW}", "-c", "5", environment={"SHOP_DATABASE_URL": through(relay, lasting_world)}
    )
    worker.ready()
    yield worker
    worker.teardown()


@dataclass
class Alive:
    """What became of five deliveries whose process lived on, without an answer or without its heartbeat."""

    at: dict[str, Seen]
    told: set[str]
    """Whose handler was told by `step.cancelled`."""
    before: dict[str, Delivery]
    log: str


@pytest.fixture(scope="module")
def alive(
    lasting_world: World, shop_kinds: Shop, few: ShopWorker, celery_worker: ShopWorker, locks: Locks,
    relay: HoldingRelay, sink: Receiver,
) -> Alive:  # fmt: skip
    world = lasting_world
    scene = Scene(world, shop_kinds, few, locks, relay, sink, queue=FEW)
    for point in ("K16 lands", "K16 taken"):
        scene.prepare(point)
        (world.gates / f"{scene.ids[point]}.K16.asked").touch()
    for point in BY_RELAY:
        scene.prepare(point, pauses=())
        scene.messages[point].cut()
    scene.make_due(*scene.ids)
    for point in BY_RELAY:
        wait_until(scene.messages[point].reached.is_set, f"{point} is cut")
    ids = scene.ids
    world.sent(ids["K12"], ids["K13"])
    beatless = (ids["K16 lands"], ids["K16 taken"])
    wait_until(lambda: all(world.executions(row_id) for row_id in beatless), "two handlers have begun")
    # Nobody reads the queue when the leases are over: nobody takes the rows.
    few.reads_no_more(FEW)
    for row_id in beatless:
        world.held_at(f"{row_id}.K16")
        wait_until(lambda: world.row(row_id).state == "pending", "the lease is over")  # noqa: B023
    told = {point for point in ids if (world.gates / f"{ids[point]}.told").exists()}
    world.open(f"{ids['K16 lands']}.K16")
    world.sent(ids["K16 lands"])
    celery_worker.also_reads(FEW)
    world.sent(*ids.values())
    before = {point: world.row(ids[point]) for point in ids}
    world.open(f"{ids['K16 taken']}.K16")
    world.journalled(ids["K16 taken"], "refused")
    celery_worker.reads_no_more(FEW)
    world.accounted(*ids.values())
    return Alive({point: scene.seen(point) for point in ids}, told, before, few.logs())


@pytest.mark.parametrize(
    ("point", "fence", "called"),
    [
        pytest.param("K4", 2, [2], id="K4 cut"),
        # The attempt is made anew under its own claim, for the row says that nothing was committed.
        pytest.param("K12", 1, [1, 1], id="K12 cut"),
        pytest.param("K13", 1, [1], id="K13 cut"),
    ],
)
def test_a_process_that_lost_the_answer_and_lives_asks_the_row_and_the_database_decides(
    alive: Alive, point: str, fence: int, called: list[int]
) -> None:
    """To the process the three are one error."""
    seen = alive.at[point]

    assert [effect.fence for effect in seen.effects] == [fence]
    assert [execution.fence for execution in seen.executions] == called
    assert len({execution.key for execution in seen.executions}) == 1
    assert (seen.row.attempts, seen.row.interruptions, seen.row.failures) == (fence, fence - 1, 0)
    assert [(line.move, line.reason) for line in seen.lines] == [("reap", "CLAIM_EXPIRED")] * (fence - 1)
    assert seen.row == alive.before[point]
    assert "claim_not_answered" in alive.log
    assert "commit_resolved" in alive.log


@pytest.mark.parametrize("point", ["K16 lands", "K16 taken"])
def test_when_its_heartbeat_alone_has_died_the_handler_is_told_by_step_cancelled(alive: Alive, point: str) -> None:
    assert point in alive.told


@pytest.mark.parametrize("point", ["K16 lands"])
def test_when_its_heartbeat_alone_has_died_and_nobody_took_its_row_its_commit_lands(alive: Alive, point: str) -> None:
    """What the reaper had counted is taken back."""
    seen = alive.at[point]

    assert (seen.row.fence, seen.row.attempts, seen.row.interruptions) == (1, 1, 0)
    assert [effect.fence for effect in seen.effects] == [1]
    assert [line.move for line in seen.lines] == ["reap", "settle late"]


@pytest.mark.parametrize("point", ["K16 taken"])
def test_when_its_heartbeat_alone_has_died_and_another_took_its_row_its_commit_is_refused(
    alive: Alive, point: str
) -> None:
    seen = alive.at[point]

    assert (seen.row.fence, seen.row.attempts, seen.row.interruptions) == (2, 2, 1)
    assert [effect.fence for effect in seen.effects] == [2]
    assert [execution.fence for execution in seen.executions] == [1, 2]
    assert [line.move for line in seen.lines] == ["reap", "refused"]
    assert seen.row == alive.before[point]


# --- K17: the reaper --------------------------------------------------------------------------------------


def kill_whoever_waits(locks: Locks, lock: str, row_id: str, control_worker: ControlWorker) -> None:
    """KILL to the process that runs the sweep: the control worker's, if not a worker's that found it late."""
    wait_until(lambda: locks.waiting(lock, row_id), f"a sweep waits at {lock}")
    port = locks.client_port(lock, row_id)
    if port in {each.laddr.port for each in psutil.Process(control_worker.process.pid).net_connections("tcp")}:
        control_worker.process.kill_leader()
        locks.let_go(lock, row_id)
    else:
        locks.end_waiting(lock, row_id)


@pytest.mark.parametrize("points", [pytest.param(("K17", "K17 after commit"), id="K17 killed")])
def test_a_reaper_killed_before_its_commit_has_done_nothing_and_after_it_leaves_the_rest_to_dispatch(
    points: tuple[str, str], lasting_world: World, shop_kinds: Shop, few: ShopWorker, celery_worker: ShopWorker,
    control_worker: ControlWorker, locks: Locks,
) -> None:  # fmt: skip
    world, (before_commit, after_commit) = lasting_world, points
    few.also_reads(FEW)
    row_id = world.commit(shop_kinds.held, "claimed", queue=FEW)
    pid = world.held_at(row_id)
    locks.hold(before_commit, row_id)
    os.kill(pid, signal.SIGSTOP)
    few.reads_no_more(FEW)
    taken = world.row(row_id)

    kill_whoever_waits(locks, before_commit, row_id, control_worker)
    wait_until(lambda: world.holding() == [], "the reaper's transaction has ended")
    assert world.row(row_id) == taken
    assert world.lines(row_id) == []

    locks.hold(after_commit, "reap")
    world.let_the_next_begin("reap")
    restart(control_worker)
    kill_whoever_waits(locks, after_commit, "reap", control_worker)
    assert (world.row(row_id).state, world.row(row_id).fence) == ("pending", 1)

    celery_worker.also_reads(FEW)
    restart(control_worker)
    (row,) = world.accounted(row_id)
    celery_worker.reads_no_more(FEW)
    assert (row.fence, row.attempts, row.interruptions) == (2, 2, 1)
    world.let_the_next_begin("reap")
    world.open(row_id)
    os.kill(pid, signal.SIGCONT)
    world.journalled(row_id, "refused")
    assert [line.move for line in world.lines(row_id)] == ["reap", "refused"]
    assert world.row(row_id) == row


def restart(worker: ShopWorker) -> None:
    if worker.process.status == "exited":
        worker.start()
        worker.ready()


# --- every point has its test ----------------------------------------------------------------------------


def test_every_point_of_the_table_has_a_test(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    names = [item.name for collected in module.collect() for item in _items(collected)]
    ids = " ".join(name.partition("[")[2] for name in names)

    assert {int(number) for number in re.findall(r"\bK(\d+)", ids)} == set(range(19))


def _items(collected: pytest.Item | pytest.Collector) -> list[pytest.Item]:
    if isinstance(collected, pytest.Collector):
        return [item for inner in collected.collect() for item in _items(inner)]
    return [collected]
