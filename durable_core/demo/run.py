"""The demo from its first process to its verdict."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError

from durable_core import wakes
from durable_core.celery_binding.publish import broker_queue
from durable_core.database.environment import REDIS_VARIABLE
from durable_core.demo import nemesis as faults
from durable_core.demo import plan
from durable_core.demo import shop as example
from durable_core.demo.nemesis import Nemesis
from durable_core.demo.processes import Process, Processes
from durable_core.demo.report import Outcome, Shown
from durable_core.demo.shop import Place, Shop
from durable_core.demo.supplier import Restocked, Supplier, declared, restocked
from durable_core.demo.tally import Evidence, counted, progress, unfinished
from durable_core.errors import DurableError
from durable_core.local.services import Services
from durable_core.sweeps import CONTROL_QUEUE

ORDERS, KILLS, FREEZES, FLUSHES = 300, 6, 3, 2
DIRECTORY = Path(".durable") / "demo"
WORKERS, CHILDREN = 2, 2
READY_WITHIN = 90.0
DRAINED_WITHIN = 90.0
"""Seconds from the last order and the last fault to the last delivery; a second rescue of one row takes 30 s."""
QUICKEST_PACE = 0.05
"""Seconds between two orders, so that a small run lasts long enough for something to go wrong."""
MOST_OPEN = 24
"""Unfinished deliveries at which the shop takes a breath."""
ROLLED_BACK_EVERY, DOUBLED_EVERY = 12, 15


class DemoFailed(DurableError):
    """The demo could not be carried out; the message is one sentence. No verdict on the deliveries."""

    reason = "DEMO_FAILED"


def main(
    orders: int = ORDERS,
    kills: int = KILLS,
    freezes: int = FREEZES,
    flushes: int = FLUSHES,
    seed: int | None = None,
    as_json: bool = False,
    directory: Path | None = None,
) -> int:
    """
    Run an example shop while its workers are killed and frozen and its Redis is emptied; count what was lost.

    The exit code: 0 when all that was promised was kept, 1 when something was lost, doubled
    or not finished, or the demo could not run; 130 when interrupted. It leaves no process
    and no port behind, and no folder unless it failed: then the logs stay in `directory`.
    """
    if orders < 1 or min(kills, freezes, flushes) < 0:
        print("demo: at least one order, and no negative number of faults.", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    folder = Path(os.path.abspath(directory or DIRECTORY))
    try:
        with _Interrupts() as interrupts:
            outcome = _carried_out(folder, orders, (kills, freezes, flushes), seed, interrupts)
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has ended.", file=sys.stderr)
        return 130
    except (OperationalError, redis.RedisError) as error:
        # The driver names host and port, never a password.
        print(f"demo: {str(getattr(error, 'orig', error)).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    except DurableError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(outcome.as_json(), flush=True)
    else:
        outcome.show(Console())
    if not outcome.kept:
        print(f"demo: logs and sinks are in {folder / 'logs'}", file=sys.stderr)
    return exit_code(outcome)


def exit_code(outcome: Outcome) -> int:
    return 0 if outcome.kept else 1


def _carried_out(
    folder: Path, orders: int, wanted: tuple[int, int, int], seed: int, interrupts: _Interrupts
) -> Outcome:
    """The whole run in a folder of its own, which stays only as evidence of what went wrong."""
    with _owned(folder):
        evidence = True
        try:
            outcome = _with_servers(folder, orders, wanted, seed, interrupts)
            evidence = not outcome.kept
        except KeyboardInterrupt:
            evidence = False
            raise
        finally:
            if not evidence or not any((folder / "logs").glob("*.log")):
                _remove(folder)
        return outcome


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name == DIRECTORY.parent.name:
        try:
            folder.parent.rmdir()
        except OSError:
            pass  # others keep something in it


def _with_servers(
    folder: Path, orders: int, wanted: tuple[int, int, int], seed: int, interrupts: _Interrupts
) -> Outcome:
    logs = folder / "logs"
    Processes.end_leftovers(logs)
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    with ExitStack() as stack:
        try:
            print("demo: starting Postgres, Valkey, workers, beat and the two sinks", file=sys.stderr, flush=True)
            services = Services(folder)
            stack.callback(services.stop, remove=True)
            addresses = services.start()
            engine = stack.enter_context(_engine(addresses.database_url))
            example.prepare(engine)
            with engine.begin() as connection:
                plan.prepare(connection)
            broker = faults.Broker(addresses.redis_url, ours=not os.environ.get(REDIS_VARIABLE))
            broker.begin()
            stack.callback(broker.end)
            # Last in, first out: the processes end before the servers that they use.
            stage = stack.enter_context(_Stage(logs, addresses.database_url, addresses.redis_url, seed, engine))
            stage.wait_until_ready()
            return _Show(stage, broker.empty, orders, wanted, seed).run()
        finally:
            # From here on everything is ended, and a second Ctrl-C must not leave half of it.
            interrupts.disarm()


class _Stage:
    """The sinks, the workers, the control worker and beat, and the shop in this very process."""

    def __init__(self, logs: Path, database_url: str, redis_url: str, seed: int, engine: Engine) -> None:
        self.logs, self.engine, self.seed = logs, engine, seed
        self._urls = database_url, redis_url
        self._numbers = iter(range(1, 1000))
        self._carrier = wakes.carrier()

    def __enter__(self) -> _Stage:
        self.processes = Processes(self.logs)
        try:
            ports = [self._sink(which) for which in ("mail", "web")]
            self.supplier = Supplier(self.processes, self.logs)
            self.supplier.start()
            self.place = Place(*self._urls, mail_port=ports[0], web_port=ports[1], supplier_port=self.supplier.port)
            self.workers = [self.start_worker() for _ in range(WORKERS)]
            self.control = self._celery("control", "worker", "-P", "solo", "-Q", CONTROL_QUEUE, "-n", "control@demo")
            self.beat = self._celery("beat", "beat", "-s", str(self.logs / "beat-schedule"), "--pidfile=")
            kinds = example.declared(self.place)
            self.restock = declared(self.supplier.port, example.WEBHOOK_QUEUE)
            example.celery_app(self.place, self.engine)
            self.shop = Shop(self.engine, kinds)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()
        wakes.use_carrier(self._carrier)

    def _sink(self, which: str) -> int:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.processes.start(
                f"{which}-sink", "durable_core.demo.sinks", which, str(listening.fileno()),
                str(self.logs / f"{which}.calls"), str(self.seed), environment={}, listening=listening,
            )  # fmt: skip
            port: int = listening.getsockname()[1]
            return port

    def _celery(self, name: str, *arguments: str) -> Process:
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat") if arguments[0] == "worker" else ()
        return self.processes.start(
            name, "celery", "-A", "durable_core.demo.app", *arguments, *quiet, environment=self.place.environment()
        )

    def start_worker(self) -> Process:
        name = f"worker-{next(self._numbers)}"
        queues = ",".join(broker_queue(queue).name for queue in (example.MAIL_QUEUE, example.WEBHOOK_QUEUE))
        return self._celery(name, "worker", "-c", str(CHILDREN), "-Q", queues, "-n", f"{name}@demo")

    def wait_until_ready(self) -> None:
        """Raises DemoFailed when a process ends, or does not say in time that it is ready."""
        until = time.monotonic() + READY_WITHIN
        waiting = [*self.workers, self.control]
        while waiting := [
            process for process in waiting if "@demo ready." not in process.log.read_text(errors="replace")
        ]:
            self.check()
            if time.monotonic() > until:
                raise DemoFailed(f"{waiting[0].name} was not ready within {READY_WITHIN:.0f} s: see {waiting[0].log}.")
            time.sleep(0.05)

    def check(self) -> None:
        """Raises DemoFailed when a process ended that nobody killed."""
        if (fallen := self.processes.fallen()) is not None:
            raise DemoFailed(f"{fallen.name} ended by itself: {fallen.last_words()} (see {fallen.log})")


class _Show:
    """The orders, the faults and the wait for the last delivery."""

    def __init__(
        self, stage: _Stage, empty_redis: Callable[[], object], orders: int, wanted: tuple[int, int, int], seed: int
    ) -> None:
        self.stage, self.orders, self.seed = stage, orders, seed
        rng = random.Random(seed)
        self.stop = threading.Event()
        self.shown = Shown(2 * orders)
        self.nemesis = Nemesis(
            engine=stage.engine, workers=stage.workers, start_worker=stage.start_worker,
            kill_worker=stage.processes.kill, empty_redis=empty_redis, plan=faults.planned(*wanted, rng), rng=rng,
            tell=self.shown.tell, stop=self.stop,
        )  # fmt: skip
        self.trouble: list[BaseException] = []
        self.plan: plan.Played | None = None
        self.open = 0
        self.restocked: Restocked | None = None

    def run(self) -> Outcome:
        began = time.monotonic()
        threads = [self._thread(act) for act in (self._take_orders, self.nemesis.run, self._restock)]
        drained, until = False, float("inf")
        with self.shown:
            try:
                while not drained and time.monotonic() < until:
                    time.sleep(0.2)
                    self._raise_trouble()
                    self.stage.check()
                    with self.stage.engine.connect() as connection:
                        counts = progress(connection)
                    self.shown.sent(counts["sent"])
                    self.open = counts["open"]
                    if not any(thread.is_alive() for thread in threads):
                        until = min(until, time.monotonic() + DRAINED_WITHIN)
                        drained = not counts["open"]
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join(timeout=30.0)
            self._raise_trouble()
            seconds = time.monotonic() - began
            if drained:
                # After the faults: a plan whose worker is killed inside a step stops there, as it promises.
                self.plan = plan.play(self.stage.engine)
                self.shown.tell(f"a plan: {self.plan.says}")
            if not drained:
                with self.stage.engine.connect() as connection:
                    self.shown.tell(f"not finished after {DRAINED_WITHIN:.0f} s more: {unfinished(connection)}")
        # Nobody may write while it is counted.
        self.stage.processes.end()
        return self._counted(drained, seconds)

    def _counted(self, drained: bool, seconds: float) -> Outcome:
        logs, shop = self.stage.logs, self.stage.shop
        with self.stage.engine.connect() as connection:
            evidence = Evidence.gathered(connection, logs.glob("*.calls"), logs.glob("*.log"), shop.placed)
        tally = counted(evidence)
        if shop.created_twice:
            tally.phantoms += shop.created_twice
            tally.examples.append(f"{shop.created_twice} duplicates of a key made a delivery of their own")
        done = {
            "orders": len(shop.placed), "rolled_back": len(shop.rolled_back), "duplicates": shop.duplicates,
            "kills": self.nemesis.kills, "freezes": self.nemesis.freezes, "flushes": self.nemesis.flushes,
        }  # fmt: skip
        return Outcome(tally, done, seconds, self.seed, drained, self.plan, self.restocked)

    def _restock(self) -> None:
        """One operation beside the orders, through the death of its supplier."""
        stage = self.stage
        self.restocked = restocked(stage.engine, stage.restock, stage.supplier, self.shown.tell, self.stop)

    def _take_orders(self) -> None:
        """
        All the orders, some rolled back and some doubled, spread over the faults.

        They run ahead of the faults by one at most, so that the last fault still finds work,
        and ahead of the workers by a little, so that what is rescued is soon taken.
        """
        shop, nemesis = self.stage.shop, self.nemesis
        steps = len(nemesis.plan) + 1
        for number in range(1, self.orders + 1):
            while (number * steps > self.orders * (nemesis.done + 1) and not nemesis.looking) or self.open > MOST_OPEN:
                if self.stop.wait(0.01):
                    return
            if self.stop.wait(QUICKEST_PACE):
                return
            if number % ROLLED_BACK_EVERY == 5:
                shop.order(example.FIRST_ROLLED_BACK + number, roll_back=True)
            shop.order(number)
            if number % DOUBLED_EVERY == 7:
                shop.order_again(number)

    def _thread(self, act: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                act()
            except BaseException as error:
                self.trouble.append(error)

        thread = threading.Thread(target=guarded, name=f"demo-{act.__name__}", daemon=True)
        thread.start()
        return thread

    def _raise_trouble(self) -> None:
        if self.trouble:
            raise self.trouble[0]


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """The folder for this run alone. Raises DemoFailed where another demo has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:
        raise DemoFailed(f"{folder} cannot be written to: name another directory, or remove it.") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"another demo is running in {folder}.") from None
        yield
    finally:
        os.close(lock)


@contextmanager
def _engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url, pool_size=5)
    try:
        yield engine
    finally:
        engine.dispose()


class _Interrupts:
    """
    Ctrl-C and SIGTERM raise KeyboardInterrupt, once, until `disarm`; after that they are ignored.

    The hole: outside the main thread nothing can be done about signals, and nothing is.
    """

    def __init__(self) -> None:
        self._armed = True
        self._before: dict[signal.Signals, Any] = {}

    def disarm(self) -> None:
        self._armed = False

    def _interrupt(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
