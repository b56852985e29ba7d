"""Named statements: loaded from beside their act, in the schema in use."""

import pytest

from durable_core.database.statements import Statements, checked_schema, in_schema, use_schema
from durable_core.errors import DefinitionError


@pytest.fixture
def statements(tmp_path):
    path = tmp_path / "act.sql"
    path.write_text(
        "-- An act.\n\n-- name: one\n-- before: nothing\nselect :n from durable.deliveries;\n\n"
        "-- name: two\nselect 'durable.x', cast(:m as text)\n"
    )
    return Statements(path)


def test_statements_are_found_by_name_without_their_semicolon(statements):
    assert [statement.name for statement in statements] == ["one", "two"]
    assert statements.one.source.endswith("from durable.deliveries")
    with pytest.raises(AttributeError, match=r"act\.sql names no statement 'three'"):
        _ = statements.three


def test_parameters_are_bound_for_both_drivers(statements):
    assert set(statements.one.clause._bindparams) == {"n"}
    assert "%(n)s" in statements.one.driver


def test_the_schema_in_use_is_written_in_quotes(statements):
    assert 'from "durable".deliveries' in statements.one.driver
    try:
        use_schema("work_2")
        assert 'from "work_2".deliveries' in statements.one.driver
        assert 'from "work_2".deliveries' in str(statements.one.clause)
    finally:
        use_schema("durable")
    assert in_schema("durable.a undurable.b durable.durable_now()") == '"durable".a undurable.b "durable".durable_now()'


@pytest.mark.parametrize("name", ["", "Work", "a-b", '"; drop', "1a", "x" * 42, "a b", None, "é", "a\n"])
def test_a_schema_name_that_would_need_quoting_is_refused(name):
    with pytest.raises(DefinitionError):
        checked_schema(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("order", "'order' is a reserved word of SQL: take another name, such as order_work."),
        ("user", "'user' is a reserved word of SQL: take another name, such as user_work."),
        ("pg_work", "'pg_work' is a name that Postgres keeps for itself: take another one."),
        ("information_schema", "'information_schema' is a name that Postgres keeps for itself: take another one."),
    ],
)
def test_a_schema_name_that_postgres_would_not_take_is_refused_with_what_to_do(name, says):
    with pytest.raises(DefinitionError) as refused:
        checked_schema(name)
    assert str(refused.value) == f"durable_schema {says}"
