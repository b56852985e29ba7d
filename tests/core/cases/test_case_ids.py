"""Ids that a caller gives to look something up: any spelling of them, and what is none."""

import uuid

import pytest

from durable_core.errors import InvalidOption


@pytest.fixture
def cases(world):
    kind = world.type()
    kind.step("go")(lambda state, ctx: ctx.correlate("carrier", "A1") or state)
    return world.cases(kind)


@pytest.mark.parametrize("spelled", [str.upper, "urn:uuid:{}".format, "{{{}}}".format, uuid.UUID])
def test_the_entries_of_an_execution_are_found_by_any_spelling_of_its_id(world, cases, spelled):
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "go")
    assert len(world.journal(cases, case_id, execution_id=spelled(done.execution_id))) == 2


@pytest.mark.parametrize("none", ["abc", 7])
def test_what_is_no_id_has_no_entries(world, cases, none):
    case_id = world.create(cases, {})
    cases.execute(case_id, "go")
    assert world.journal(cases, case_id, execution_id=none) == []


@pytest.mark.parametrize("after", ["abc", "", 7])
def test_a_page_after_what_is_no_id_is_refused_before_the_database_is_asked(world, cases, after):
    case_id = world.create(cases, {})
    cases.execute(case_id, "go")
    with world.begin() as tx:
        with pytest.raises(InvalidOption):
            cases.correlations(tx, case_id, after=after)
        with pytest.raises(InvalidOption):
            cases.dead_letters(tx, after=after)
        (one,) = cases.correlations(tx, case_id)
        assert cases.correlations(tx, case_id, after=f"urn:uuid:{one.id}") == []
