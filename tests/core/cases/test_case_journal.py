"""The journal of a case: append only by the database, chained, erasable; and what the database refuses of cases."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from durable_core import InvalidOption
from durable_core.cases import journal
from durable_core.cases.declare import Attempts
from durable_core.cases.journal import FaultKind, Head, Payload, Seal, payload_digest_of
from durable_core.database.transactions import sqlstate
from durable_core.errors import DefinitionError
from durable_core.refusals import CaseNotFound, ExecutionFailed
from tests.core.cases.worlds import Crash


def say(state, ctx):
    return {"said": ctx.input or "", "n": state["n"] + 1}


def declared(world, **how):
    kind = world.type()
    kind.step("say", input=str | None, permits={"anybody": lambda state, actor: True})(say)
    kind.step("fail", retry=Attempts(2, 0))(lambda state, ctx: 1 / 0)
    return world.cases(kind, **how)


def played(world, cases, times=3):
    """A case with so many commits, and one execution that failed."""
    case_id = world.create(cases, {"n": 0})
    for n in range(times):
        cases.execute(case_id, "say", actor={"name": "ann"}, input=f"word {n}")
    with pytest.raises(ExecutionFailed):
        cases.execute(case_id, "fail", actor={"name": "bob"})
    return case_id


def verified(world, cases, case_id, **how):
    with world.begin() as tx:
        return cases.verify(tx, case_id, **how)


def as_superuser(engine, *statements, **parameters):
    """Past the guards, as only a superuser can."""
    with engine.begin() as tx:
        tx.execute(text("set local session_replication_role = replica"))
        for statement in statements:
            tx.execute(text(statement), parameters)


def faults(world, cases, case_id, **how):
    return [(fault.number, fault.kind) for fault in verified(world, cases, case_id, **how).faults]


def refused(engine, statement, **parameters):
    with pytest.raises(DBAPIError) as error, engine.begin() as tx:
        tx.execute(text(statement), parameters)
    return sqlstate(error.value)


# --- the chain -------------------------------------------------------------------------------------


def test_a_journal_as_it_was_written_verifies(world):
    cases = declared(world)
    case_id = played(world, cases)
    seen = verified(world, cases, case_id)
    assert (seen.ok, seen.entries, seen.erased, seen.unkeyed) == (True, 9, 0, 9)
    assert seen.head == world.get(cases, case_id).head
    entries = world.journal(cases, case_id)
    assert [entry.number for entry in entries] == list(range(1, 10))
    assert sorted(entry.ordinal for entry in entries) == [entry.ordinal for entry in entries]
    assert len({entry.salt for entry in entries}) == 9
    empty = world.create(cases, {"n": 0})
    assert (verified(world, cases, empty).entries, verified(world, cases, empty).ok) == (0, True)


@pytest.mark.parametrize(
    "change",
    [
        "step = 'other'",
        'actor = \'{"name":"eve"}\'',
        "input = '\"another word\"'",
        "state = '{\"n\": 7}'",
        "guard = cast(replace(cast(guard as text), 'true', 'false') as json)",
        "as_of = as_of + interval '1 microsecond'",
        "recorded_at = recorded_at - interval '1 microsecond'",
        "execution_id = gen_random_uuid()",
        "request_id = gen_random_uuid()",
        "id = gen_random_uuid()",
        "attempt = 2",
        "scope_key = 'a'",
        "salt = 'another'",
        "payload_digest = repeat('a', 64)",
        "digest = repeat('a', 64)",
    ],
)
def test_whatever_is_edited_in_an_entry_is_found(postgres, engine, change):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(engine, f"update durable.case_journal set {change} where case_id = :id and number = 3", id=case_id)
    assert faults(postgres, cases, case_id) == [(3, FaultKind.EDITED)]


@pytest.mark.parametrize(
    ("change", "number"), [("seq = 7", 2), ("dormancy = 'ended'", 2), ("delta = '[]'", 2), ("error = '{}'", 9)]
)
def test_an_edited_end_of_an_execution_is_found(postgres, engine, change, number):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    change = f"update durable.case_journal set {change} where case_id = :id and number = :n"
    as_superuser(engine, change, id=case_id, n=number)
    assert faults(postgres, cases, case_id) == [(number, FaultKind.EDITED)]


def test_an_entry_that_is_missing_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(engine, "delete from durable.case_journal where case_id = :id and number in (3, 4)", id=case_id)
    found = verified(postgres, cases, case_id).faults
    assert [(fault.number, fault.kind) for fault in found] == [(5, FaultKind.MISSING), (9, FaultKind.HEAD)]
    assert found[0].problem == "entries 3 to 4 are missing"


def test_an_entry_that_is_missing_is_found_also_where_the_rest_is_numbered_anew(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(
        engine,
        "delete from durable.case_journal where case_id = :id and number = 7",
        "update durable.case_journal set number = number - 1 where case_id = :id and number = 8",
        "update durable.case_journal set number = number - 1 where case_id = :id and number = 9",
        id=case_id,
    )
    assert [number for number, _ in faults(postgres, cases, case_id)] == [7, 8, 9]


def test_entries_that_changed_places_are_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(
        engine,
        "update durable.case_journal set number = 100 where case_id = :id and number = 3",
        "update durable.case_journal set number = 3 where case_id = :id and number = 5",
        "update durable.case_journal set number = 5 where case_id = :id and number = 100",
        id=case_id,
    )
    assert {3, 5} <= {number for number, _ in faults(postgres, cases, case_id)}


def test_a_chain_that_was_not_written_behind_the_entry_before_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(engine, "update durable.case_journal set chain = repeat('a', 64) where number = 4", id=case_id)
    assert faults(postgres, cases, case_id) == [(4, FaultKind.REORDERED), (5, FaultKind.REORDERED)]


def test_a_tail_that_is_missing_is_found_by_the_case_and_with_its_head_by_a_head_that_was_kept(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    kept = postgres.get(cases, case_id).head
    assert verified(postgres, cases, case_id, head=kept).ok
    as_superuser(engine, "delete from durable.case_journal where case_id = :id and number > 6", id=case_id)
    assert faults(postgres, cases, case_id) == [(9, FaultKind.MISSING)]
    as_superuser(
        engine,
        "update durable.cases c set journal_count = 6, journal_head = j.chain from durable.case_journal j"
        " where c.id = :id and j.case_id = c.id and j.number = 6",
        id=case_id,
    )
    assert verified(postgres, cases, case_id).ok
    assert faults(postgres, cases, case_id, head=kept) == [(9, FaultKind.MISSING)]
    cases.execute(case_id, "say")
    with pytest.raises(ExecutionFailed):
        cases.execute(case_id, "fail")
    assert faults(postgres, cases, case_id, head=kept) == [(9, FaultKind.HEAD)]


def test_an_entry_behind_the_last_that_the_case_counts_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(
        engine,
        "update durable.cases c set journal_count = 8, journal_head = j.chain from durable.case_journal j"
        " where c.id = :id and j.case_id = c.id and j.number = 8",
        id=case_id,
    )
    assert faults(postgres, cases, case_id) == [(9, FaultKind.HEAD)]


def test_a_count_of_commits_that_is_not_the_journals_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(engine, "update durable.cases set seq = 2 where id = :id", id=case_id)
    assert faults(postgres, cases, case_id) == [(9, FaultKind.HEAD)]


def test_a_state_that_is_not_what_the_last_commit_made_of_it_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    as_superuser(engine, "update durable.cases set state = jsonb_set(state, '{n}', 'true') where id = :id", id=case_id)
    assert faults(postgres, cases, case_id) == [(9, FaultKind.STATE)]


def test_a_state_that_was_edited_between_two_commits_is_found_also_after_the_next(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases, times=1)
    as_superuser(engine, "update durable.cases set state = jsonb_set(state, '{n}', '100') where id = :id", id=case_id)
    cases.execute(case_id, "say")
    assert postgres.get(cases, case_id).state["n"] == 101
    assert faults(postgres, cases, case_id) == [(6, FaultKind.STATE)]


def test_a_state_that_was_edited_before_any_commit_is_found_by_its_claim(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases, times=0)
    as_superuser(engine, "update durable.cases set state = '{}' where id = :id", id=case_id)
    assert faults(postgres, cases, case_id) == [(3, FaultKind.STATE)]


def test_a_dormancy_that_no_entry_tells_of_is_found(postgres, engine):
    kind = postgres.type()
    kind.step("end")(lambda state, ctx: ctx.end() or state)
    kind.step("reopen")(lambda state, ctx: ctx.reopen() or state)
    cases = postgres.cases(kind)
    case_id = postgres.create(cases, {})
    for step, dormant in (("end", True), ("end", True), ("reopen", False), ("end", True)):
        cases.execute(case_id, step)
        assert verified(postgres, cases, case_id).ok
        assert (postgres.get(cases, case_id).ended_at is not None) is dormant
    as_superuser(engine, "update durable.cases set ended_at = null where id = :id", id=case_id)
    assert faults(postgres, cases, case_id) == [(8, FaultKind.STATE)]


def test_a_payload_without_its_salt_is_found(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    with engine.connect() as tx, tx.begin() as forging:
        tx.execute(text("set local session_replication_role = replica"))
        for constraint in ("carries_what_its_kind_has", "erased_is_gone"):
            tx.execute(text(f"alter table durable.case_journal drop constraint {constraint}"))
        change = "update durable.case_journal set salt = null, actor = '\"eve\"', {} where case_id = :id and number = 3"
        for erased in ("erased_at = null", "erased_at = recorded_at, erased_by = 'eve'"):
            tx.execute(text(change.format(erased)), {"id": case_id})
            found = [(fault.number, fault.kind) for fault in cases.verify(tx, case_id).faults]
            assert found == [(3, FaultKind.EDITED)]
        forging.rollback()


def forged(postgres, engine, cases, case_id, key):
    """The whole journal written anew by somebody who can write past the guards, another actor in its first entry."""
    head, seal = Head(0, journal.GENESIS), Seal(key)
    for entry in postgres.journal(cases, case_id):
        payload = entry.payload._replace(actor='"eve"') if entry.number == 1 else entry.payload
        new = seal.sealed(_draft(entry, payload), case_id, head, entry.recorded_at)
        as_superuser(
            engine,
            "update durable.case_journal set actor = cast(:actor as json), salt = :salt, payload_digest = :payload,"
            " digest = :digest, chain = :chain, keyed = :keyed where case_id = :id and number = :n",
            actor=payload.actor, salt=new.salt, payload=new.payload_digest, digest=new.digest, chain=new.chain,
            keyed=new.keyed, id=case_id, n=entry.number,
        )  # fmt: skip
        head = Head(new.number, new.chain)
    as_superuser(engine, "update durable.cases set journal_head = :head where id = :id", head=head.chain, id=case_id)


def _draft(entry, payload):
    fields = {name: getattr(entry, name) for name in journal.Draft.__dataclass_fields__}
    return journal.Draft(**{**fields, "payload": payload})


def test_who_writes_the_whole_chain_anew_is_found_by_a_head_that_was_kept_and_by_nothing_else(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    kept = postgres.get(cases, case_id).head
    forged(postgres, engine, cases, case_id, None)
    assert verified(postgres, cases, case_id).ok
    assert faults(postgres, cases, case_id, head=kept) == [(9, FaultKind.HEAD)]


def test_with_a_key_who_does_not_have_it_cannot_write_the_chain_anew(postgres, engine):
    cases = declared(postgres, journal_key="one key")
    case_id = played(postgres, cases)
    seen = verified(postgres, cases, case_id)
    assert (seen.ok, seen.unkeyed) == (True, 0)
    forged(postgres, engine, cases, case_id, b"another key")
    assert {kind for _, kind in faults(postgres, cases, case_id)} == {FaultKind.EDITED}
    # Without any key it can be done, and shows: none of its entries has one.
    forged(postgres, engine, cases, case_id, None)
    seen = verified(postgres, cases, case_id)
    assert (seen.unkeyed, seen.entries) == (9, 9)
    cases.execute(case_id, "say")
    with postgres.begin() as tx:
        assert cases.verify(tx, case_id).unkeyed == 9


def test_a_key_may_come_later_but_not_go(world):
    plain = declared(world)
    case_id = played(world, plain, times=1)
    keyed = world.cases(*plain.types.values(), journal_key=b"one key")
    keyed.execute(case_id, "say")
    seen = verified(world, keyed, case_id)
    assert (seen.ok, seen.entries, seen.unkeyed) == (True, 7, 5)
    assert {kind for _, kind in faults(world, plain, case_id)} == {FaultKind.UNKEYED}
    plain.execute(case_id, "say")
    assert faults(world, keyed, case_id) == [(8, FaultKind.UNKEYED), (9, FaultKind.UNKEYED)]


def test_the_key_of_the_process_seals_where_cases_names_none(world):
    cases = declared(world)
    asked = []
    journal.use_key(lambda: asked.append(1) or "of the settings")
    try:
        case_id = played(world, cases)
        assert verified(world, cases, case_id).unkeyed == 0
        assert asked == [1]
        for wrong in ("", 7):
            with pytest.raises(DefinitionError):
                journal.use_key(wrong)
    finally:
        journal.use_key(None)
    assert {kind for _, kind in faults(world, cases, case_id)} == {FaultKind.UNKEYED}


def test_equal_entries_have_digests_of_their_own():
    payload = Payload(actor='"ann"')
    assert payload_digest_of("a", payload) != payload_digest_of("b", payload)
    assert payload_digest_of("a", payload) != payload_digest_of("a", Payload(input='"ann"'))


# --- erasing ---------------------------------------------------------------------------------------


def test_a_persons_data_can_be_erased_and_the_chain_still_holds(world):
    cases = declared(world)
    case_id = played(world, cases)
    head = world.get(cases, case_id).head
    with world.begin() as tx:
        assert cases.erase(tx, case_id, by="dana", numbers=[1, 2, 9]) == [1, 2, 9]
    entries = world.journal(cases, case_id)
    assert {entries[n].payload for n in (0, 1, 8)} == {Payload()}
    assert [(e.erased_by, e.salt) for e in (entries[0], entries[1])] == [("dana", None)] * 2
    assert entries[2].actor == {"name": "ann"}
    seen = verified(world, cases, case_id, head=head)
    assert (seen.ok, seen.erased) == (True, 3)
    with world.begin() as tx:
        assert cases.erase(tx, case_id, by="dana") == [3, 4, 5, 6, 7, 8]
        assert cases.erase(tx, case_id, by="eve") == []
    assert verified(world, cases, case_id).ok
    cases.execute(case_id, "say")
    assert verified(world, cases, case_id).ok
    with world.begin() as tx:
        with pytest.raises(InvalidOption):
            cases.erase(tx, case_id, by="")
        with pytest.raises(CaseNotFound):
            cases.erase(tx, "0198c1de-0000-7000-8000-000000000000", by="dana")


def test_what_stays_of_an_erased_entry_is_still_verified(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    with postgres.begin() as tx:
        cases.erase(tx, case_id, by="dana", numbers=[3])
    as_superuser(engine, "update durable.case_journal set step = 'other' where number = 3")
    assert faults(postgres, cases, case_id) == [(3, FaultKind.EDITED)]


def test_a_claim_that_was_erased_is_told_at_its_replay_and_fails_no_running_execution(world):
    cases = declared(world)
    kind = next(iter(cases.types.values()))

    def erasing(state, ctx):
        with world.begin() as tx:
            cases.erase(tx, ctx.case_id, by="dana")
        return state

    kind.step("erase")(erasing)
    case_id = world.create(cases, {"n": 0})
    assert cases.execute(case_id, "erase").seq == 1
    with world.begin() as tx:
        (one,) = cases.replay(tx, case_id)
    assert (one.matches, str(one.unasked)) == (False, "ERASED")


# --- what the database refuses ---------------------------------------------------------------------


@pytest.mark.spec("cases", 41)
def test_the_database_refuses_to_change_and_to_delete_entries(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    before = postgres.everything()
    for statement in (
        "delete from durable.case_journal where number = 9",
        "truncate durable.case_journal",
        "truncate durable.cases cascade",
        "update durable.case_journal set step = 'other' where number = 1",
        "update durable.case_journal set actor = '\"eve\"' where number = 1",
        "update durable.case_journal set number = number + 100 where number = 9",
        # Erasing, but not whole; or whole, and something else with it.
        "update durable.case_journal set erased_at = recorded_at, erased_by = 'x', step = 'y', salt = null,"
        " actor = null, input = null, guard = null, state = null, delta = null, error = null where number = 1",
        "update durable.case_journal set erased_at = recorded_at, erased_by = 'x', actor = null where number = 1",
    ):
        assert refused(engine, statement) == "55000", statement
    with postgres.begin() as tx:
        cases.erase(tx, case_id, by="dana", numbers=[1])
    assert refused(engine, "update durable.case_journal set erased_by = 'eve' where number = 1") == "55000"
    assert refused(engine, "update durable.case_journal set erased_at = null, erased_by = null") == "55000"
    after = postgres.everything()
    assert [a == b for a, b in zip(before[0]["case_journal"], after[0]["case_journal"], strict=True)].count(False) == 1


@pytest.mark.spec("cases", 41)
def test_the_database_refuses_an_entry_that_is_not_the_next_of_its_case(postgres, engine):
    cases = declared(postgres)
    case_id = played(postgres, cases)
    insert = (
        "insert into durable.case_journal (case_id, number, id, execution_id, entry, attempt, step, error, salt,"
        " payload_digest, digest, chain, keyed, recorded_at)"
        " select case_id, :n, gen_random_uuid(), execution_id, 'failed', 1, step, error, salt, payload_digest, digest,"
        " chain, keyed, recorded_at from durable.case_journal where case_id = :id and number = 9"
    )
    for number in (9, 11):
        assert refused(engine, insert, n=number, id=case_id) == "55000"


def test_the_database_refuses_what_no_execution_does_to_a_case(postgres, engine):
    kind = postgres.type()
    kind.step("go")(lambda state, ctx: {"n": 1})

    def crash(state, ctx):
        raise Crash

    kind.step("crash")(crash)
    cases = postgres.cases(kind)
    case_id = postgres.create(cases, {"n": 0})
    cases.execute(case_id, "go")
    free = (
        "delete from durable.cases",
        "truncate durable.cases cascade",
        "update durable.cases set state = '{}'",
        "update durable.cases set ended_at = now()",
        "update durable.cases set seq = seq + 1",
        "update durable.cases set seq = seq + 1, state = '{}'",
        "update durable.cases set seq = seq - 1",
        "update durable.cases set case_type = 'other'",
        "update durable.cases set id = gen_random_uuid()",
        "update durable.cases set journal_count = journal_count + 1",
        "update durable.cases set journal_count = journal_count - 1",
        "update durable.cases set journal_head = repeat('a', 64)",
    )
    for statement in free:
        assert refused(engine, statement) == "55000", statement
    insert = (
        "insert into durable.cases (id, case_type, state, seq, ended_at, journal_count, created_at, updated_at)"
        " values (gen_random_uuid(), 'x', '{}', :seq, :ended, :count, now(), now())"
    )
    for wrong in ({"seq": 1}, {"ended": "2030-01-01"}, {"count": 1}):
        assert refused(engine, insert, **({"seq": 0, "ended": None, "count": 0} | wrong)) == "55000"
    with pytest.raises(Crash):
        cases.execute(case_id, "crash")
    for statement in (
        "update durable.cases set state = '{}'",
        "update durable.cases set seq = seq + 2",
        "update durable.cases set seq = seq - 1",
    ):
        assert refused(engine, statement) == "55000", statement


def test_the_database_keeps_an_event_as_it_came(engine):
    with engine.begin() as tx:
        tx.execute(
            text(
                "insert into durable.case_events (id, system, external_id, type, idempotency_key, event, received_at,"
                " pending_at) values (gen_random_uuid(), 's', 'e', 't', 'k', '{\"a\": 1}', now(), now())"
            )
        )
    for change in ("system = 'x'", "external_id = 'x'", "type = 'x'", "idempotency_key = 'x'", "event = '{\"a\":  1}'"):
        assert refused(engine, f"update durable.case_events set {change}") == "55000", change
    settle = "update durable.case_events set status = 'executed', execution_id = gen_random_uuid(), settled_at = now()"
    with engine.begin() as tx:
        tx.execute(text(settle))
    assert refused(engine, settle) == "55000"
    assert refused(engine, "update durable.case_events set status = 'pending', execution_id = null") == "55000"


# --- reading it ------------------------------------------------------------------------------------


def test_a_journal_is_read_in_pages_and_by_what_is_looked_for(world):
    cases = declared(world)
    case_id = played(world, cases)
    entries = world.journal(cases, case_id)
    with world.begin() as tx:
        assert [e.number for e in cases.journal(tx, case_id, after=2, limit=3)] == [3, 4, 5]
        assert [e.number for e in cases.journal(tx, case_id, step="fail")] == [7, 8, 9]
        assert [e.number for e in cases.journal(tx, case_id, step="fail", kinds=["failed"])] == [9]
        assert [e.number for e in cases.journal(tx, case_id, kinds=["claimed"], after=1)] == [3, 5, 7]
        assert [e.number for e in cases.journal(tx, case_id, execution_id=entries[2].execution_id)] == [3, 4]
        assert [e.number for e in cases.journal(tx, case_id, step="fail", after=7, limit=1)] == [8]
        execution_id = entries[2].execution_id
        assert [e.number for e in cases.journal(tx, case_id, execution_id=execution_id, after=3)] == [4]
        assert cases.journal(tx, case_id, execution_id="nonsense") == []
        assert cases.journal(tx, case_id, scope_key="a") == []
        for wrong in ({"limit": 0}, {"limit": 1001}, {"kinds": ["claims"]}):
            with pytest.raises(InvalidOption):
                cases.journal(tx, case_id, **wrong)
        with pytest.raises(CaseNotFound):
            cases.journal(tx, "nonsense")


def test_executions_are_folded_from_the_journal(world):
    cases = declared(world)
    case_id = played(world, cases)
    with world.begin() as tx:
        found = cases.executions(tx, case_id)
        assert [(str(one.status), one.step, one.attempts, one.seq) for one in found] == [
            ("completed", "say", 1, 1), ("completed", "say", 1, 2), ("completed", "say", 1, 3),
            ("failed", "fail", 2, None),
        ]  # fmt: skip
        assert [one.first_entry for one in cases.executions(tx, case_id, limit=2)] == [1, 3]
        assert [one.first_entry for one in cases.executions(tx, case_id, after=1, limit=2)] == [3, 5]
        assert [one.first_entry for one in cases.executions(tx, case_id, after=2, limit=1000)] == [3, 5, 7]
        assert [one.first_entry for one in cases.executions(tx, case_id, step="fail")] == [7]
        with pytest.raises(InvalidOption):
            cases.executions(tx, case_id, limit=0)


@pytest.mark.spec("cases", 25, 28)
def test_every_claim_of_a_journal_can_be_asked_again(world):
    kind = world.type(actor=None)
    instants = []

    def at_noon(state, as_of):
        instants.append(as_of)
        return as_of.microsecond % 2 == 0

    kind.step("go", requires={"even": at_noon}, permits={"pair": lambda state, actor: len(actor) == 2})(
        lambda state, ctx: {"n": state["n"] + 1}
    )
    cases = world.cases(kind)
    case_id = world.create(cases, {"n": 0})
    for n in range(3):
        at = world.clock.now().replace(microsecond=123450 + n * 2)
        cases.execute(case_id, "go", actor=("a", "b"), as_of=at)
    with world.begin() as tx:
        found = cases.replay(tx, case_id)
    assert [(one.matches, one.number) for one in found] == [(True, 1), (True, 3), (True, 5)]
    assert instants[:3] == instants[3:]


def test_reading_writes_nothing(world):
    cases = declared(world)
    case_id = played(world, cases)
    before = world.everything()
    with world.begin() as tx:
        cases.get(tx, case_id)
        cases.affordances(tx, case_id, actor="ann", blocked=True)
        cases.explain(tx, case_id, "say")
        cases.journal(tx, case_id)
        cases.executions(tx, case_id)
        cases.replay(tx, case_id)
        cases.verify(tx, case_id)
    assert world.everything() == before


def test_entries_appended_at_once_are_numbered_one_by_one(postgres):
    """Six that fail at once and six that wait: the journal has no gap and no fork."""
    cases = declared(postgres)
    case_id = postgres.create(cases, {"n": 0})
    start = threading.Barrier(6)

    def one(_):
        start.wait()
        for _ in range(4):
            try:
                cases.execute(case_id, "say")
            except Exception:
                continue

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    seen = verified(postgres, cases, case_id)
    assert seen.ok, seen.faults
    assert seen.entries == 2 * postgres.get(cases, case_id).seq > 0
    assert json.loads(json.dumps(postgres.get(cases, case_id).state))["n"] == postgres.get(cases, case_id).seq
