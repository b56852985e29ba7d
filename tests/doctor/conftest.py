"""A database to break, cloned anew for each test, and a role such as an application has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from durable_core.database.connections import Database
from durable_core.doctor import database as of_database
from durable_core.doctor import standstill, work
from durable_core.doctor.findings import Check, Examination, Finding, Reason, Status, examine
from durable_core.local.services import Addresses
from durable_core.sweeps import SWEEPS
from durable_core.testing import create_database, drop_database, migrated

Findings = Callable[..., list[Finding]]


@pytest.fixture(scope="session")
def whole(services: Addresses, worker_id: str) -> Iterator[str]:
    """The name of a migrated database with the clock it is born with, to be cloned."""
    name = f"durable_whole_{worker_id}"
    migrated(create_database(services.database_url, name)).dispose()
    yield name
    drop_database(services.database_url, name)


@pytest.fixture
def owner(services: Addresses, whole: str, worker_id: str) -> Iterator[Engine]:
    """A clone, as the superuser that owns it sees it."""
    name = f"durable_patient_{worker_id}"
    engine = create_engine(create_database(services.database_url, name, template=whole))
    yield engine
    engine.dispose()
    drop_database(services.database_url, name)


@pytest.fixture
def role(owner: Engine, worker_id: str) -> Iterator[str]:
    """A role of the application: it may use our tables, and owns nothing."""
    name = f"doctor_app_{worker_id}"
    with owner.begin() as tx:
        tx.execute(text(f"drop role if exists {name}"))
        tx.execute(text(f"create role {name} login password 'doctor-app'"))
        tx.execute(text(f"grant usage on schema durable to {name}"))
        tx.execute(text(f"grant select, insert, update, delete on all tables in schema durable to {name}"))
    yield name
    with owner.begin() as tx:
        tx.execute(text(f"drop owned by {name}"))
        tx.execute(text(f"drop role {name}"))


@pytest.fixture
def app(owner: Engine, role: str) -> Iterator[Engine]:
    """The same database, as that role."""
    engine = create_engine(owner.url.set(username=role, password="doctor-app"))
    yield engine
    engine.dispose()


def checks_of(engine: Engine) -> list[Check]:
    database = Database(engine)
    return [
        *of_database.checks(database, grace_seconds=30),
        *work.checks(database, lambda: work.Installation(SWEEPS)),
        *standstill.checks(database, lambda: work.Installation(SWEEPS)),
    ]


def look(engine: Engine, only: str | None = None, seconds: float = 20) -> Examination:
    """An examination of this database: all of it, or what one check finds behind the gates."""
    checks = checks_of(engine)
    wanted = [check for check in checks if only is None or check.name == only]
    return examine(wanted, seconds=seconds)


def only(engine: Engine, check: str) -> Finding:
    """The one finding of a check."""
    (finding,) = look(engine, check).findings
    return finding


def reasons(engine: Engine, check: str) -> list[Reason]:
    return [finding.reason for finding in look(engine, check).findings]


def is_mendable(finding: Finding, reason: Reason, status: Status) -> bool:
    """Whether it is this finding, and says in one line what mends it."""
    assert (finding.reason, finding.status) == (reason, status), finding
    assert finding.observed
    assert finding.fix
    assert "\n" not in finding.observed + finding.fix
    return True
