"""Everything at once over the same rows: nothing deadlocks, and a deadlock of the host's own costs no attempt."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from durable_core import Backoff, GiveUp, Retry, Step, deliveries, wakes
from durable_core.claims.claim import Holder
from durable_core.claims.each import holding
from durable_core.database.connections import Database
from durable_core.deliveries import sweep
from durable_core.deliveries.attempt import Outcome, Worker, claim_due, perform
from durable_core.deliveries.declare import DeliveryKind
from durable_core.deliveries.enqueue import enqueue_many
from durable_core.errors import IllegalMove, KeyInFlight, NotFound, RowBusy
from durable_core.testing import migrated
from tests.celery.nodes import wait_until
from tests.conftest import EFFECTS, record
from tests.faults.servers import Cluster

POSTGRES = {"deadlock_timeout": "20ms", "max_connections": "120", "fsync": "off"}
WORKERS = 8
OWNER = "the-parent"


class Hints(wakes.Carrier):
    """A broker of this process: dispatch and commits put hints in, workers take them out."""

    def __init__(self) -> None:
        self.lying: deque[wakes.Hint] = deque()

    def offer(self, hints: Iterable[wakes.Hint]) -> None:
        self.lying.extend(hints)

    def publish(self, hints: Iterable[wakes.Hint]) -> int:
        new = list(hints)
        self.lying.extend(new)
        return len(new)

    def depths(self, queues: Iterable[str]) -> dict[str, int]:
        lying = Counter(hint.queue for hint in list(self.lying))
        return {queue: lying[queue] for queue in queues}


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Engine]:
    engine = migrated(cluster.url)
    with engine.begin() as connection:
        connection.execute(text(EFFECTS))
        connection.execute(text("create table accounts (id int primary key, moved int not null default 0)"))
        connection.execute(text("insert into accounts select generate_series(1, 2)"))
    yield engine
    engine.dispose()


class Crowd:
    """Threads that do one thing each, again and again, each over connections of its own, until the time is up."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._seed = url, seed
        self._over, self._counting = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self.died: list[BaseException] = []
        self.done: Counter[str] = Counter()

    def join(self, name: str, act: Callable[[Database, random.Random], int], pause: float = 0.0) -> None:
        draw = random.Random(f"{self._seed} {name} {len(self._threads)}")

        def again_and_again() -> None:
            engine = create_engine(self._url)
            try:
                while not self._over.wait(pause):
                    times = act(Database(engine), draw)
                    with self._counting:
                        self.done[name] += times
            except BaseException as error:
                self.died.append(error)
            finally:
                engine.dispose()

        self._threads.append(threading.Thread(target=again_and_again, name=name))

    def go(self, seconds: float) -> None:
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.died:
            time.sleep(0.1)
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"


ROW = "select cast(id as text) from durable.deliveries where {} order by random() limit 5"


@pytest.mark.field("R58")
@pytest.mark.full_size
def test_workers_sweeps_and_operators_over_the_same_rows_never_deadlock_and_the_books_agree(
    cluster: Cluster, server: Engine, declare: Callable[..., Any], seed: int, sized: Callable[[int, int], int]
) -> None:
    calm, accepted = threading.Event(), set[str]()
    moods = random.Random(seed)

    def handler(step: Step, n: int = 0) -> None:
        mood = 1.0 if calm.is_set() else moods.random()
        if mood < 0.3:
            raise Retry(after=0)
        if mood < 0.5:
            raise GiveUp("no")
        if mood < 0.6:
            time.sleep(0.4)  # longer than half its lease
        record(step.session, step)

    kind = declare(handler, max_attempts=1_000_000, max_interruptions=1_000_000, backoff=Backoff(base=0.01, cap=0.01))
    hints, crowd = Hints(), Crowd(cluster.url, seed)
    quick = {"lease_seconds": 0.6, "heartbeat_seconds": 0.15}
    heartbeats: list[Any] = []

    def enqueue(database: Database, draw: random.Random, count: int = 3) -> int:
        """Two keys of another's batch among them, in any order."""
        new = [kind.options().new(n) for n in range(count)]
        new += [kind.options(key=f"k{draw.randrange(20)}").new() for _ in range(2)]
        draw.shuffle(new)
        try:
            with database.transaction() as tx:
                refs = enqueue_many(tx, new)
        except KeyInFlight:
            return 0
        accepted.update(ref.id for ref in refs if ref.created)
        return len(refs)

    workers: dict[int, Worker] = {}

    def work(database: Database, draw: random.Random) -> int:
        me = threading.get_ident()
        if me not in workers:
            workers[me] = Worker(Database(create_engine(cluster.url)), Holder(**quick), random=draw.random)
            heartbeats.append(workers[me].heartbeat)
        try:
            hint = hints.lying.popleft()
        except IndexError:
            time.sleep(0.01)
            return 0
        return int(perform(workers[me], kind, hint.id).outcome is Outcome.SENT)

    def die(database: Database, draw: random.Random) -> int:
        """Claim, and be heard of no more; now one whose parent looks after it, now one that only the reaper finds."""
        holder = Holder(owner=draw.choice((OWNER, "an orphan")), pid=draw.randrange(1, 5), **quick)
        with database.autocommit() as tx:
            return len(claim_due(tx, 3, holder=holder))

    def give_back(database: Database, draw: random.Random) -> int:
        pids = sweep.holding_pids(database, OWNER)
        return sweep.give_back(database, OWNER, pids, shutdown=draw.random() < 0.5, random=draw.random)

    def hold(database: Database, draw: random.Random) -> int:
        with database.transaction() as tx:
            found = tx.execute(
                text("select id, fence from durable.deliveries where state = 'processing' and held_reason is null"
                     " limit 1 for no key update skip locked")
            ).mappings().all()  # fmt: skip
            for row in found:
                holding(tx, sweep._statements.hold, state="processing")(dict(row), "a test")
            return len(found)

    def operate(act: Callable[..., None], where: str) -> Callable[[Database, random.Random], int]:
        def _operate(database: Database, draw: random.Random) -> int:
            with database.autocommit() as tx:
                ids = list(tx.scalars(text(ROW.format(where))))
            done = 0
            with database.transaction() as tx:  # several rows in one transaction, in any order
                for row_id in ids:
                    try:
                        act(tx, row_id, by="dana", reason="a test")
                        done += 1
                    except (RowBusy, IllegalMove, NotFound):
                        pass
            return done

        return _operate

    setting_up = Database(server)
    while len(accepted) < sized(100, 500):
        enqueue(setting_up, moods, 40)
    for _ in range(WORKERS):
        crowd.join("work", work)
    for _ in range(2):
        crowd.join("enqueue", lambda d, r: enqueue(d, r) if len(accepted) < sized(400, 3000) else 0, 0.05)
        crowd.join("reap", lambda d, r: sweep.reap(d, limit=50, heartbeat_seconds=0.15, random=r.random), 0.05)
        crowd.join("dispatch", lambda d, r: sweep.dispatch(d, hints, cap=100), 0.05)
        crowd.join("prune", lambda d, r: sweep.prune(d, retention_seconds=0.2, limit=20), 0.05)
        crowd.join("redrive", operate(deliveries.redrive, "state in ('dead', 'failed')"), 0.01)
        crowd.join("release", operate(deliveries.release, "held_reason is not null"), 0.02)
    crowd.join("die", die, 0.2)
    crowd.join("give back", give_back, 0.1)
    crowd.join("hold", hold, 0.1)
    crowd.go(sized(10, 60))
    for heartbeat in heartbeats:
        heartbeat.stop()
    assert not crowd.died, crowd.died
    assert "deadlock detected" not in cluster.log()
    did_nothing = {thread.name for thread in crowd._threads} - {name for name, done in crowd.done.items() if done}
    assert not did_nothing, "each had its part in it"

    def states() -> dict[str, int]:
        with server.connect() as tx:
            found = tx.execute(text("select state, count(*) from durable.deliveries group by state"))
            return {state: count for state, count in found}

    pruned = crowd.done["prune"]
    assert sum(states().values()) + pruned == len(accepted)

    # Now all goes well, and every row ends sent, with one effect.
    calm.set()
    last = Worker(setting_up, Holder(**quick))

    def finished() -> bool:
        operate(deliveries.redrive, "state in ('dead', 'failed')")(setting_up, moods)
        operate(deliveries.release, "held_reason is not null")(setting_up, moods)
        sweep.reap(setting_up, heartbeat_seconds=0.15, random=lambda: 0.0)
        with setting_up.transaction() as tx:  # rescue delays are not what this is about
            tx.execute(text("update durable.deliveries set due_at = least(due_at, now()) where state = 'pending'"))
            due = list(tx.scalars(text("select cast(id as text) from durable.deliveries where state = 'pending'")))
        for row_id in due:
            perform(last, kind, row_id)
        return set(states()) <= {"sent"}

    wait_until(finished, "everything is sent", 120)
    last.heartbeat.stop()
    with server.connect() as tx:
        effects = list(tx.scalars(text("select row_id from effects")))
        orphans = tx.scalar(text(
            "select count(*) from durable.journal j where not exists"
            " (select from durable.deliveries d where d.id = j.row_id)"
        ))  # fmt: skip
        wrong = tx.execute(text(
            "select d.id from durable.deliveries d join effects e on e.row_id = cast(d.id as text)"
            " where e.fence <> d.settled_fence"
        )).all()  # fmt: skip
    assert sorted(effects) == sorted(accepted), "one effect for each, the pruned ones included"
    assert not wrong
    assert not orphans
    for worker in workers.values():
        worker.database.engine.dispose()


@pytest.mark.parametrize("form", ["session", "in_commit"])
def test_a_deadlock_of_the_hosts_own_making_costs_no_attempt_and_both_are_sent(
    cluster: Cluster, server: Engine, declare: Callable[..., DeliveryKind[..., Any]], form: str
) -> None:
    """Two handlers lock the same two rows of the host's, one in each order."""
    both_have_one, calls, effects = threading.Barrier(2), Counter[str](), Counter[str]()

    def move(session: Session, step: Step, order: list[int]) -> None:
        effects[step.id] += 1
        for place, account in enumerate(order):
            session.execute(text("update accounts set moved = moved + 1 where id = :id"), {"id": account})
            if place == 0 and effects[step.id] == 1:
                both_have_one.wait(30)
        record(session, step, form)

    def handler(step: Step, order: list[int]) -> None:
        calls[step.id] += 1
        if form == "session":
            move(step.session, step, order)
        else:
            step.in_commit(lambda session: move(session, step, order))

    kind = declare(handler, max_attempts=1)
    with server.begin() as tx:
        rows = [kind.options().enqueue(tx, order).id for order in ([1, 2], [2, 1])]
        tx.execute(text("update accounts set moved = 0"))
    deadlocks = cluster.log().count("deadlock detected")
    workers = [Worker(Database(create_engine(cluster.url)), Holder()) for _ in rows]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda pair: perform(pair[0], kind, pair[1]).outcome, zip(workers, rows, strict=True)))
    for worker in workers:
        worker.heartbeat.stop()
        worker.database.engine.dispose()
    assert cluster.log().count("deadlock detected") > deadlocks, "it was a real one"
    assert outcomes == [Outcome.SENT, Outcome.SENT]
    with server.connect() as tx:
        for row_id in rows:
            row = deliveries.get(tx, row_id)
            assert (row.state, row.attempts, row.failures, row.interruptions) == ("sent", 1, 0, 0)
            noted = tx.execute(text("select fence from effects where row_id = :id"), {"id": row_id}).all()
            assert [one.fence for one in noted] == [1]
        assert list(tx.scalars(text("select moved from accounts"))) == [2, 2]
    # What was written in the step's session went with it, so that handler ran again; the other's call was made once.
    assert sorted(calls.values()) == ([1, 2] if form == "session" else [1, 1])
