"""
What every test shares: one Postgres and one Valkey per pytest process, and a migrated database emptied after each test.

`services` starts both in a folder of their own; DURABLE_DATABASE_URL and DURABLE_REDIS_URL name others.
The clock of the test database is movable: `clock.advance(seconds=31)` instead of a sleep.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import hypothesis
import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from durable_core import Step, deliveries, kinds, target_version, wakes
from durable_core.claims.claim import Holder
from durable_core.claims.journal import Line
from durable_core.database.connections import Database
from durable_core.deliveries.attempt import Worker
from durable_core.deliveries.declare import DeliveryKind, delivery, registry
from durable_core.deliveries.read import Delivery
from durable_core.local.services import Addresses
from durable_core.plans.target import forget_reader
from durable_core.testing import Made, MovableClock, create_database, empty, make_delivery, migrated
from tests.core.document_desk import Desk
from tests.core.plan_shop import PRODUCTS, Shop
from tests.elsewhere import quick_servers

EFFECTS = "create table public.effects (id bigint generated always as identity, row_id text, fence bigint, note text)"
"""A table of the host's own, for handlers to write to."""

hypothesis.settings.register_profile("durable", deadline=None, database=None, max_examples=60)
hypothesis.settings.load_profile("durable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-size",
        action="store_true",
        help="run scenarios as large as their reports",
    )
    parser.addoption("--seed", type=int, default=None, help="repeat a run: the seed that its header printed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)


LONGEST = ("test_schema_versions.py", "test_pooler.py")
"""At full size each of them runs all tests of the core once more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes starts first, so that no process ends with it alone."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; the same in every process of it."""
    value: int = request.config.option.seed
    return value


T = TypeVar("T")


@pytest.fixture(scope="session")
def sized(request: pytest.FixtureRequest) -> Callable[[T, T], T]:
    """How large a scenario is: `sized(500, 100_000)` is 500, and 100,000 with --full-size."""
    full: bool = request.config.option.full_size

    def _sized(test_size: T, full_size: T) -> T:
        return full_size if full else test_size

    return _sized


@pytest.fixture(scope="session")
def services() -> Iterator[Addresses]:
    """The addresses of Postgres and Valkey, started for this pytest process."""
    with quick_servers() as addresses:
        yield addresses


@pytest.fixture(scope="session")
def test_database(services: Addresses, worker_id: str) -> Iterator[Engine]:
    """
    The database of this pytest process: migrated, with a movable clock and the table `effects`.

    Not `fresh_database`: one test starts this suite on a server of its own, and looks at what it left there.
    """
    engine = migrated(create_database(services.database_url, f"durable_test_{worker_id}"))
    with engine.begin() as connection:
        connection.execute(text(EFFECTS))
    MovableClock(engine).install()
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.fixture
def engine(test_database: Engine) -> Iterator[Engine]:
    """An engine on the migrated database, which is emptied and gets real time again after the test."""
    yield test_database
    empty(test_database)
    MovableClock(test_database).reset()


@pytest.fixture
def database(engine: Engine) -> Database:
    return Database(engine)


@pytest.fixture
def conn(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction that is rolled back at the end."""
    with engine.connect() as connection:
        transaction = connection.begin()
        yield connection
        if transaction.is_active:
            transaction.rollback()


@pytest.fixture
def clock(engine: Engine) -> MovableClock:
    """The database's clock; real time again after the test."""
    return MovableClock(engine)


@pytest.fixture
def other_engine(engine: Engine) -> Iterator[Engine]:
    """The same database through connections of its own: somebody else's process."""
    other = create_engine(engine.url, pool_size=20)
    yield other
    other.dispose()


_names = (f"test.kind_{number}" for number in itertools.count(1))


def note(step: Step, n: int = 0) -> int:
    """Write one row that commits with the receipt."""
    record(step.session, step, str(n))
    return n


def record(session: Any, step: Step, text_: str = "") -> None:
    """One row of `effects` for this attempt."""
    session.execute(
        text("insert into effects (row_id, fence, note) values (:id, :fence, :note)"),
        {"id": step.id, "fence": step.fence, "note": text_},
    )


def effects_of(engine: Engine, row_id: str) -> list[tuple[int, str]]:
    """The committed effects of a delivery: fence and note, in order."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("select fence, note from effects where row_id = :id order by id"), {"id": row_id}
        )
        return [(row.fence, row.note) for row in rows]


@pytest.fixture
def declare() -> Iterator[Callable[..., DeliveryKind[..., Any]]]:
    """Declare a kind for this test alone: `declare(handler, max_attempts=2)`; without a handler it writes an effect."""
    declared: list[str] = []

    def _declare(handler: Callable[..., Any] = note, *, name: str | None = None, **terms: Any) -> Any:
        kind = delivery(name or next(_names), **terms)(handler)
        declared.append(kind.name)
        return kind

    yield _declare
    for name in declared:
        registry.remove(name)


@pytest.fixture
def kind(declare: Callable[..., DeliveryKind[..., Any]]) -> DeliveryKind[..., Any]:
    """A kind whose handler writes one effect in its step's session."""
    return declare()


@pytest.fixture
def make(engine: Engine, kind: DeliveryKind[..., Any]) -> Callable[..., Made]:
    """A committed delivery in a wanted state, by legal moves: `make(state="processing")`."""

    def _make(of: DeliveryKind[..., Any] | None = None, arguments: dict[str, object] | None = None, **how: Any) -> Made:
        with engine.begin() as connection:
            return make_delivery(connection, of or kind, arguments, **how)

    return _make


@pytest.fixture
def row(engine: Engine) -> Callable[[str], Delivery]:
    """The committed row of a delivery: `row(made.id).state`."""

    def _row(row_id: str) -> Delivery:
        with engine.connect() as connection:
            return deliveries.get(connection, row_id)

    return _row


@pytest.fixture
def lines(engine: Engine) -> Callable[[str], list[Line]]:
    """The committed journal of a delivery."""

    def _lines(row_id: str) -> list[Line]:
        with engine.connect() as connection:
            return deliveries.journal(connection, row_id)

    return _lines


@pytest.fixture
def make_worker(database: Database) -> Iterator[Callable[..., Worker]]:
    """A worker of this process; `make_worker(lease_seconds=0.6, heartbeat_seconds=0.15)` for a quick one."""
    made: list[Worker] = []

    def _make(*, on: Database | None = None, draw: Callable[[], float] = lambda: 0.5, **holder: Any) -> Worker:
        worker = Worker(on or database, Holder(**holder), random=draw)
        made.append(worker)
        return worker

    yield _make
    for worker in made:
        assert worker.heartbeat is not None
        worker.heartbeat.stop()


@pytest.fixture
def worker(make_worker: Callable[..., Worker]) -> Worker:
    """A worker with the default lease of 30 s, whose random source always draws the middle."""
    return make_worker()


@pytest.fixture
def desk(engine: Engine) -> Iterator[Desk]:
    """A collection of briefs, and more of them; forgotten after the test."""
    desk = Desk(engine)
    yield desk
    desk.close()


@pytest.fixture
def shop(engine: Engine) -> Iterator[Shop]:
    """Steps of plans, declared for this test alone, and the products that they change."""
    with engine.begin() as connection:
        connection.execute(text(PRODUCTS))

    @target_version("product")
    def product_version(session: Any, product_id: Any) -> Any:
        return session.scalar(text("select version from products where id = :id for update"), {"id": product_id})

    made = Shop(engine)
    yield made
    forget_reader("product")
    for name in made.declared:
        kinds.plan_steps.remove(name)


class Recorded(wakes.Carrier):
    """A carrier that keeps what it was offered, and can be told to fail: no fake of the database."""

    def __init__(self) -> None:
        self.offered: list[wakes.Hint] = []
        self.published: list[wakes.Hint] = []
        self.lying: dict[str, int] = {}
        self.refuses: Exception | None = None

    def offer(self, hints: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.offered.extend(hints)

    def publish(self, hints: Any) -> int:
        if self.refuses is not None:
            raise self.refuses
        new = list(hints)
        self.published.extend(new)
        for hint in new:
            self.lying[hint.queue] = self.lying.get(hint.queue, 0) + 1
        return len(new)

    def depths(self, queues: Any) -> dict[str, int]:
        return {queue: self.lying.get(queue, 0) for queue in queues}


@pytest.fixture
def carrier() -> Iterator[Recorded]:
    """The carrier of this process for this test: it records the hints."""
    before, recorded = wakes.carrier(), Recorded()
    wakes.wake()
    wakes.use_carrier(recorded)
    yield recorded
    wakes.wake()
    wakes.use_carrier(before)


@pytest.fixture(scope="session", autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    random.seed(request.config.option.seed)
