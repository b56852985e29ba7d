"""Both servers of one machine as one thing to start and stop."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from durable_core.database.environment import DATABASE_VARIABLE, REDIS_VARIABLE
from durable_core.local.postgres import Postgres
from durable_core.local.valkey import Valkey, find_binary


@dataclass(frozen=True)
class Addresses:
    """Where the two servers are, passwords included: not for a log."""

    database_url: str
    redis_url: str


class Services:
    """
    Postgres and Valkey in `directory`, or the servers that DURABLE_DATABASE_URL and DURABLE_REDIS_URL name.

    A server named by a variable is neither started nor stopped. Ours outlive a parent that is killed; the
    next `start` in the same directory uses them again if they answer and are the ones asked for, and else
    replaces them. One living process at a time may own a directory; two directories never meet.

    Data stay in `directory` between runs. As root, where `directory` lies below a folder closed to others,
    they go to a folder under the system's temporary directory, which `stop` removes unless `keep` is true.
    """

    def __init__(
        self,
        directory: Path,
        *,
        postgres_settings: Mapping[str, str] | None = None,
        postgres_bin: Path | None = None,
        keep: bool = False,
    ) -> None:
        self._postgres = Postgres(directory, settings=postgres_settings, binaries=postgres_bin, keep=keep)
        self._valkey = Valkey(directory, keep=keep)

    def start(self) -> Addresses:
        """
        Return once both answer; the database `durable` exists and is empty at the first start.

        Raises LocalServicesError, with nothing left running, where a server is missing, fails to start, or
        belongs to another living process.
        """
        try:
            if not os.environ.get(REDIS_VARIABLE):
                find_binary()  # before a cluster is made: one without the other is of no use
            return Addresses(
                database_url=os.environ.get(DATABASE_VARIABLE) or self._postgres.start(),
                redis_url=os.environ.get(REDIS_VARIABLE) or self._valkey.start(),
            )
        except BaseException:
            self.stop()
            raise

    def stop(self, *, remove: bool = False) -> None:
        """End what `start` started or took over; with `remove`, delete its data, passwords and logs too."""
        try:
            self._valkey.stop(remove=remove)
        finally:
            self._postgres.stop(remove=remove)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def running(directory: Path) -> Addresses | None:
    """
    The addresses of the servers in `directory`, for a process that does not own them; None if one is down.

    The variables win here too. It looks at processes, not connections: a server may be busy starting.
    """
    database_url = os.environ.get(DATABASE_VARIABLE) or Postgres(directory).address_of_running()
    redis_url = os.environ.get(REDIS_VARIABLE) or Valkey(directory).address_of_running()
    return Addresses(database_url, redis_url) if database_url and redis_url else None
