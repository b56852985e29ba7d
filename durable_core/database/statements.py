"""
Named statements from the `.sql` file beside their act.

A file names its statements with `-- name: take`; `:parameters` are bound, `durable.` is
the schema. Nobody writes SQL elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sqlalchemy import TextClause, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from durable_core.errors import DefinitionError

DEFAULT_SCHEMA = "durable"
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}\Z")
_QUALIFIER = re.compile(r"\bdurable\.(?=[a-z_])")
_HEADER = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)

_DIALECT = PGDialect_psycopg()  # type: ignore[no-untyped-call]  # SQLAlchemy types no dialect's constructor

_RESERVED = _DIALECT.identifier_preparer.reserved_words | {
    "collation",
    "concurrently",
    "lateral",
    "system_user",
    "tablesample",
}
"""What Postgres, of any release, reads as a word of its own where a schema is named; SQLAlchemy knows most of them."""

_schema: str | Callable[[], str] = DEFAULT_SCHEMA


def checked_schema(name: str) -> str:
    """A schema name that needs no quoting anywhere, not by a person either. Raises DefinitionError."""
    if not isinstance(name, str) or not _SCHEMA_NAME.match(name):
        raise DefinitionError(
            f"durable_schema {name!r}: use small letters, digits and '_', at most 41, not starting with a digit."
        )
    if name in _RESERVED:
        raise DefinitionError(
            f"durable_schema {name!r} is a reserved word of SQL: take another name, such as {name}_work."
        )
    if name.startswith("pg_") or name == "information_schema":
        raise DefinitionError(f"durable_schema {name!r} is a name that Postgres keeps for itself: take another one.")
    return name


def use_schema(name: str | Callable[[], str]) -> None:
    """
    Name the schema of our tables for this process, or say who knows it. One process works with one schema.

    A function is asked once, when the first statement needs it.
    """
    global _schema
    _schema = name if callable(name) else checked_schema(name)


def current_schema() -> str:
    global _schema
    if not isinstance(_schema, str):
        _schema = checked_schema(_schema())
    return _schema


def in_schema(sql: str, schema: str | None = None) -> str:
    """The SQL with `durable.` replaced by the schema in use."""
    return _QUALIFIER.sub(f'"{checked_schema(schema or current_schema())}".', sql)


LOOK = "select 'look'"


@dataclass(frozen=True)
class Statement:
    """One named statement, for SQLAlchemy (`clause`) and for a bare psycopg connection (`driver`)."""

    name: str
    source: str

    def holding(self, part: Statement) -> Statement:
        """This statement with another in the place of its LOOK: each stays beside the act that it is of."""
        before, after = self.source.split(LOOK)
        return Statement(f"{self.name} {part.name}", before + part.source + after)

    @property
    def clause(self) -> TextClause:
        return _clause(self.source, current_schema())

    @property
    def driver(self) -> str:
        return _driver(self.source, current_schema())


@lru_cache(maxsize=1024)
def _clause(source: str, schema: str) -> TextClause:
    return text(in_schema(source, schema))


@lru_cache(maxsize=1024)
def _driver(source: str, schema: str) -> str:
    return str(_clause(source, schema).compile(dialect=_DIALECT))


class Statements:
    """The statements of one file, as attributes named as in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = _HEADER.split(path.read_text(encoding="utf-8"))
        self._by_name = {
            name: Statement(name, body.strip().rstrip(";")) for name, body in zip(parts[1::2], parts[2::2], strict=True)
        }

    def __getattr__(self, name: str) -> Statement:
        try:
            return self.__dict__["_by_name"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"{self.__dict__['path'].name} names no statement {name!r}") from None

    def __iter__(self) -> Iterator[Statement]:
        return iter(self._by_name.values())


def beside(python_file: str) -> Statements:
    """The statements of the `.sql` file with the same name as this `.py` file."""
    return Statements(Path(python_file).with_suffix(".sql"))
