"""Claim, run, commit: the same tests on Postgres and in memory, on a clock that is moved."""

import json

import pytest
from pydantic import BaseModel

from durable_core import DefinitionError, GiveUp
from durable_core.cases.declare import Attempts, Scope, Unmet
from durable_core.refusals import (
    BadScopeKey,
    CaseBusy,
    CaseClaimLost,
    CaseNotFound,
    ExecutionFailed,
    InvalidInput,
    InvalidState,
    StepNotAvailable,
    UnknownCaseType,
    UnknownStep,
)
from tests.core.cases.worlds import Crash

both = pytest.mark.spec("cases", 39)


class Sale(BaseModel):
    offers: list[int] = []
    sold: bool = False


class Offer(BaseModel):
    amount: int
    currency: str = "EUR"


def not_sold(state):
    return True if not state.sold else Unmet("it is sold")


def offer(state, ctx):
    state.offers.append(ctx.input.amount)
    return state


@pytest.fixture
def sale(world):
    kind = world.type(Sale)
    kind.step("offer", input=Offer, requires={"not sold": not_sold})(offer)
    kind.step("sell", requires={"not sold": not_sold})(lambda state, ctx: Sale(offers=state.offers, sold=True))
    return kind


def crashing(state, ctx):
    raise Crash


def held(world, cases, case_id, *, step="crash", actor=None, **how):
    """A claim whose owner is gone."""
    with pytest.raises(Crash):
        cases.execute(case_id, step, actor=actor, **how)


# --- claim and commit ------------------------------------------------------------------------------


@both
@pytest.mark.spec("cases", 1)
def test_a_commit_writes_state_seq_and_two_entries_and_leaves_no_claim(world, sale):
    cases = world.cases(sale)
    case_id = world.create(cases, Sale(offers=[1]))
    done = cases.execute(case_id, "offer", actor="ann", input={"amount": 7})
    case = world.get(cases, case_id)
    assert (case.state, case.seq, case.claim) == (Sale(offers=[1, 7]), 1, None)
    claimed, completed = world.journal(cases, case_id)
    assert (claimed.entry, completed.entry) == ("claimed", "completed")
    assert claimed.state == {"offers": [1], "sold": False}
    assert (claimed.actor, claimed.input) == ("ann", {"amount": 7, "currency": "EUR"})
    assert claimed.guard == done.guard.to_json()
    assert claimed.as_of == done.guard.as_of
    assert (claimed.delta, completed.state, completed.guard, completed.input) == (None, None, None, None)
    assert completed.delta == done.delta == [{"op": "add", "path": "/offers/-", "value": 7}]
    assert {claimed.execution_id, completed.execution_id} == {done.execution_id}
    assert (done.seq, completed.seq, done.attempts, done.state) == (1, 1, 1, Sale(offers=[1, 7]))
    assert (done.claimed_at, done.committed_at) == (claimed.recorded_at, completed.recorded_at)


@both
@pytest.mark.spec("cases", 2)
def test_a_live_claim_of_another_is_busy_with_its_expiry_and_nothing_is_written(world):
    kind = world.type()
    kind.step("crash")(crashing)
    kind.step("go")(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    held(world, cases, case_id)
    before, claim = world.everything(), world.get(cases, case_id).claim
    with pytest.raises(CaseBusy) as busy:
        cases.execute(case_id, "go")
    assert world.everything() == before
    assert (busy.value.execution_id, busy.value.step) == (claim.execution_id, "crash")
    assert busy.value.expires_at == claim.expires_at
    assert (claim.expires_at - claim.claimed_at).total_seconds() == 30


@both
@pytest.mark.spec("cases", 3)
def test_a_lapsed_claim_is_taken_over_and_its_end_is_recorded(world):
    kind = world.type()

    def second_time(state, ctx):
        if ctx.attempt == 1:
            raise ValueError("once")
        raise Crash

    kind.step("crash", retry=Attempts(3, 1))(second_time)
    kind.step("go")(lambda state, ctx: {"gone": True})
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    held(world, cases, case_id, actor="old")
    dead = world.get(cases, case_id).claim
    assert dead.attempt == 2
    world.clock.advance(30)
    done = cases.execute(case_id, "go", actor="new")
    entries = world.journal(cases, case_id)
    assert [(str(e.entry), e.attempt) for e in entries] == [
        ("claimed", 1), ("attempt-failed", 1), ("expired", 2), ("claimed", 1), ("completed", 1),
    ]  # fmt: skip
    assert [e.execution_id for e in entries] == [dead.execution_id] * 3 + [done.execution_id] * 2
    assert (entries[2].step, entries[2].actor, entries[2].error["name"]) == ("crash", None, "LeaseExpired")
    assert [e.number for e in entries] == [1, 2, 3, 4, 5]
    assert world.get(cases, case_id).seq == 1


@both
@pytest.mark.spec("cases", 4)
@pytest.mark.parametrize(
    ("step", "how", "refusal"),
    [
        ("never", {}, StepNotAvailable),
        ("missing", {}, UnknownStep),
        ("go", {"scope_key": "a"}, BadScopeKey),
        ("offer", {"input": {"amount": "much"}}, InvalidInput),
    ],
)
def test_a_refusal_before_a_lapsed_claim_leaves_everything_as_it_was(world, step, how, refusal):
    kind = world.type()
    kind.step("crash")(crashing)
    kind.step("go")(lambda state, ctx: state)
    kind.step("never", requires={"never": lambda state: False})(lambda state, ctx: state)
    kind.step("offer", input=Offer)(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    held(world, cases, case_id)
    world.clock.advance(31)
    before = world.everything()
    with pytest.raises(refusal):
        cases.execute(case_id, step, **how)
    assert world.everything() == before
    assert world.get(cases, case_id).claim is not None


@both
@pytest.mark.spec("cases", 5)
def test_a_claim_that_ends_at_this_very_instant_has_lapsed(world):
    kind = world.type()
    kind.step("crash")(crashing)
    kind.step("go")(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    held(world, cases, case_id)
    claim = world.get(cases, case_id).claim
    world.clock.advance(29.999999)
    with pytest.raises(CaseBusy):
        cases.execute(case_id, "go")
    world.clock.advance(0.000001)
    assert world.clock.now() == claim.expires_at
    assert cases.execute(case_id, "go").seq == 1


@both
def test_a_lease_and_a_heartbeat_can_be_given_for_one_call(world):
    kind = world.type()
    kind.step("crash")(crashing)
    cases = world.cases(kind, lease=60, heartbeat=10)
    case_id = world.create(cases, {})
    held(world, cases, case_id, lease=9)
    claim = world.get(cases, case_id).claim
    assert (claim.expires_at - claim.claimed_at).total_seconds() == 9
    for wrong in ({"lease": 9, "heartbeat": 3}, {"lease": 0}, {"heartbeat": float("nan")}, {"lease": True}):
        with pytest.raises(DefinitionError):
            cases.execute(case_id, "crash", **wrong)


@both
def test_a_case_that_is_not_there_and_a_type_that_is_not_known(world, sale):
    cases = world.cases(sale)
    other = world.type()
    for missing in ("no id", "0198c1de-0000-7000-8000-000000000000"):
        with pytest.raises(CaseNotFound):
            cases.execute(missing, "sell")
    case_id = world.create(world.cases(other), {})
    before = world.everything()
    with pytest.raises(UnknownCaseType) as unknown:
        cases.execute(case_id, "sell")
    assert unknown.value.known == (sale.name,)
    with world.begin() as tx, pytest.raises(UnknownCaseType):
        cases.create(tx, "nothing", {})
    assert world.everything() == before


@both
def test_a_stored_state_that_no_longer_fits_is_told_before_anything_else(world):
    old, new = world.type(), world.type(Sale)
    new.name = old.name
    old.step("crash")(crashing)
    case_id = world.create(world.cases(old), {"offers": "many"})
    held(world, world.cases(old), case_id)
    before = world.everything()
    with pytest.raises(InvalidState) as invalid:
        world.cases(new).execute(case_id, "missing")
    assert invalid.value.case_id == case_id
    assert world.everything() == before
    with world.begin() as tx, pytest.raises(InvalidState):
        world.cases(new).get(tx, case_id)
    with world.begin() as tx, pytest.raises(InvalidState):
        world.cases(new).create(tx, new, {"offers": "many"})
    assert world.everything() == before


# --- running ---------------------------------------------------------------------------------------


@both
@pytest.mark.spec("cases", 10)
def test_a_handler_longer_than_its_lease_keeps_it_by_its_beats(world):
    kind = world.type()
    seen = []

    def long(state, ctx):
        for _ in range(4):
            world.clock.advance(3)
            seen.append(world.get(cases, case_id).claim.expires_at > world.clock.now())
        with pytest.raises(CaseBusy):
            cases.execute(case_id, "long")
        return {"done": True}

    kind.step("long")(long)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "long", lease=10, heartbeat=3)
    assert seen == [True] * 4
    assert (done.seq, world.kinds(cases, case_id)) == (1, [("claimed", 1), ("completed", 1)])


@both
@pytest.mark.spec("cases", 11)
def test_a_handler_that_overran_its_lease_commits_where_nobody_took_the_case(world, monkeypatch):
    kind = world.type()

    def long(state, ctx):
        world.clock.advance(12)
        assert world.get(cases, case_id).claim.expires_at < world.clock.now()
        return {"done": True}

    kind.step("long")(long)
    cases = world.cases(kind)
    monkeypatch.setattr(world.clock, "every", lambda seconds, act: lambda: None)
    case_id = world.create(cases, {})
    assert cases.execute(case_id, "long", lease=10, heartbeat=3).seq == 1


@both
@pytest.mark.spec("cases", 12)
def test_a_beat_after_a_takeover_changes_nothing_and_the_commit_is_refused(world, monkeypatch):
    kind = world.type()
    beats = []
    monkeypatch.setattr(world.clock, "every", lambda seconds, act: beats.append(act) or (lambda: None))

    def slow(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, "slow"))
        world.clock.advance(31)
        with pytest.raises(Crash):
            cases.execute(case_id, "crash")
        world.clock.advance(1)
        before = world.everything()
        beats[0]()
        assert world.everything() == before
        return {"by": "slow"}

    kind.step("slow", retry=Attempts(3, 0))(slow)
    kind.step("crash")(crashing)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(CaseClaimLost) as lost:
        cases.execute(case_id, "slow")
    case = world.get(cases, case_id)
    entries = world.journal(cases, case_id)
    assert [(str(e.entry), e.attempt) for e in entries] == [
        ("claimed", 1), ("expired", 1), ("claimed", 1), ("failed", 1),
    ]  # fmt: skip
    assert lost.value.holder == case.claim.execution_id == entries[2].execution_id
    assert (entries[3].execution_id, entries[3].error["name"]) == (lost.value.execution_id, "CaseClaimLost")
    assert (case.state, case.seq) == ({}, 0)
    with world.begin() as tx:
        assert world.read(tx) == []


@both
@pytest.mark.spec("cases", 12)
def test_a_beat_that_fails_never_fails_the_handler(world, monkeypatch):
    kind = world.type()
    beaten = []

    def broken(*_):
        beaten.append(1)
        raise OSError("no database")

    def long(state, ctx):
        world.clock.advance(12)
        return {"done": True}

    kind.step("long")(long)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    monkeypatch.setattr(cases.store, "keep", broken)
    assert cases.execute(case_id, "long").seq == 1
    assert beaten == [1, 1]


@both
def test_no_beat_comes_after_the_end(world, monkeypatch):
    kind = world.type()
    kind.step("go")(lambda state, ctx: state)
    kind.step("fail", retry=1)(lambda state, ctx: 1 / 0)
    kind.step("crash")(crashing)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    cases.execute(case_id, "go")
    with pytest.raises(ExecutionFailed):
        cases.execute(case_id, "fail")
    held(world, cases, case_id)
    beats = []
    monkeypatch.setattr(cases.store, "keep", lambda *_: beats.append(1))
    world.clock.advance(20)
    assert beats == []


@both
@pytest.mark.spec("cases", 13)
def test_two_failures_then_a_success_are_one_execution_in_one_lease(world):
    kind = world.type()
    seen, counters = [], []

    def third_time(state, ctx):
        seen.append((ctx.execution_id, ctx.key, ctx.attempt, ctx.max_attempts, json.dumps(state)))
        state["touched"] = ctx.attempt
        if ctx.attempt < 3:
            raise ValueError(f"attempt {ctx.attempt}")
        return state

    kind.step("go", retry=Attempts(3, lambda failed: failed * 10))(third_time)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    sleep = world.clock.sleep

    def counting(seconds):
        counters.append(world.get(cases, case_id).claim.attempt)
        sleep(seconds)

    world.clock.sleep = counting
    done = cases.execute(case_id, "go")
    assert (done.attempts, done.state) == (3, {"touched": 3})
    assert seen == [(done.execution_id, done.execution_id, n, 3, "{}") for n in (1, 2, 3)]
    assert world.clock.slept == [10, 20]
    assert counters == [2, 3]
    entries = world.journal(cases, case_id)
    assert [(str(e.entry), e.attempt) for e in entries] == [
        ("claimed", 1), ("attempt-failed", 1), ("attempt-failed", 2), ("completed", 3),
    ]  # fmt: skip
    assert entries[1].error == {"name": "ValueError", "message": "attempt 1"}
    assert {e.execution_id for e in entries} == {done.execution_id}


@both
def test_beats_go_on_through_the_sleep_between_two_attempts(world):
    kind = world.type()

    def second_time(state, ctx):
        if ctx.attempt == 1:
            raise ValueError
        assert world.get(cases, case_id).claim.expires_at > world.clock.now()
        return state

    kind.step("go", retry=Attempts(2, 60))(second_time)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    assert cases.execute(case_id, "go").attempts == 2


@both
@pytest.mark.spec("cases", 14)
def test_attempts_that_are_used_up_are_told_and_the_case_is_free(world):
    kind = world.type()

    def fails(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, "never"))
        raise RuntimeError(f"no {ctx.attempt}")

    kind.step("fail", retry=Attempts(2, 0))(fails)
    kind.step("go")(lambda state, ctx: {"went": True})
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "fail", actor="ann")
    assert (failed.value.attempts, str(failed.value.cause)) == (2, "no 2")
    assert world.kinds(cases, case_id) == [("claimed", 1), ("attempt-failed", 1), ("failed", 2)]
    last = world.journal(cases, case_id)[-1]
    assert (last.error, last.actor) == ({"name": "RuntimeError", "message": "no 2"}, "ann")
    assert world.get(cases, case_id).claim is None
    assert cases.execute(case_id, "go").seq == 1
    with world.begin() as tx:
        assert world.read(tx) == []


@both
@pytest.mark.spec("cases", 15)
@pytest.mark.parametrize(
    "returned", [{"offers": "many"}, None, 7, {"offers": [float("nan")]}], ids=["invalid", "none", "number", "nan"]
)
def test_a_state_that_does_not_fit_is_refused_after_one_attempt(world, returned):
    kind = world.type(Sale)
    kind.step("go", retry=Attempts(3, 0))(lambda state, ctx: returned)
    cases = world.cases(kind)
    case_id = world.create(cases, Sale())
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "go")
    assert isinstance(failed.value.cause, InvalidState)
    assert failed.value.attempts == 1
    assert world.kinds(cases, case_id) == [("claimed", 1), ("failed", 1)]
    case = world.get(cases, case_id)
    assert (case.seq, case.claim, case.state) == (0, None, Sale())


@both
def test_a_handler_that_gives_up_is_not_tried_again(world):
    kind = world.type()

    def gives_up(state, ctx):
        raise GiveUp("it can never work")

    kind.step("go", retry=Attempts(3, 0))(gives_up)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "go")
    assert (failed.value.attempts, failed.value.error) == (1, "GiveUp")


@both
def test_a_policy_for_one_call_is_checked_before_the_claim(world):
    kind = world.type()
    kind.step("fail", retry=Attempts(3, 0))(lambda state, ctx: 1 / 0)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    before = world.everything()
    with pytest.raises(DefinitionError):
        cases.execute(case_id, "fail", retry=0)
    assert world.everything() == before
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "fail", retry=1)
    assert failed.value.attempts == 1


@both
@pytest.mark.spec("cases", 16)
def test_what_an_attempt_that_failed_had_registered_is_forgotten(world):
    kind = world.type()

    def second_time(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, f"attempt {ctx.attempt}"))
        if ctx.attempt == 1:
            ctx.correlate("mail", "m-1")
            ctx.end()
            raise ValueError
        return {"n": ctx.attempt}

    kind.step("go", retry=Attempts(2, 0))(second_time)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "go")
    assert (done.attempts, done.dormancy) == (2, None)
    assert not world.get(cases, case_id).ended
    with world.begin() as tx:
        assert world.read(tx) == ["attempt 2"]
        assert cases.store.within(tx).correlation("mail", "m-1") is None


@both
@pytest.mark.spec("cases", 17)
def test_a_write_that_raises_undoes_everything_and_counts_as_a_failed_attempt(world):
    kind = world.type()

    def go(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, f"first {ctx.attempt}"))
        ctx.correlate("mail", f"m-{ctx.attempt}")
        ctx.end()
        if ctx.attempt == 1:
            ctx.in_commit(lambda tx: 1 / 0)
        return {"n": ctx.attempt}

    kind.step("go", retry=Attempts(2, 0))(go)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "go")
    assert (done.attempts, done.seq, done.state) == (2, 1, {"n": 2})
    assert world.kinds(cases, case_id) == [("claimed", 1), ("attempt-failed", 1), ("completed", 2)]
    with world.begin() as tx:
        assert world.read(tx) == ["first 2"]
        assert cases.store.within(tx).correlation("mail", "m-1") is None
        assert cases.store.within(tx).correlation("mail", "m-2").case_id == case_id


@both
@pytest.mark.spec("cases", 17)
def test_a_write_that_raises_every_time_leaves_nothing_but_the_journal(world):
    kind = world.type()

    def go(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, "first"))
        ctx.in_commit(lambda tx: 1 / 0)
        return {"n": ctx.attempt}

    kind.step("go", retry=Attempts(2, 0))(go)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(ExecutionFailed):
        cases.execute(case_id, "go")
    case = world.get(cases, case_id)
    assert (case.state, case.seq, case.claim) == ({}, 0, None)
    assert world.kinds(cases, case_id) == [("claimed", 1), ("attempt-failed", 1), ("failed", 2)]
    with world.begin() as tx:
        assert world.read(tx) == []


@both
@pytest.mark.spec("cases", 18)
def test_writes_run_in_order_and_see_each_other_and_the_new_state(world):
    kind = world.type()
    seen = []

    def go(state, ctx):
        ctx.in_commit(lambda tx: world.write(tx, "one"))
        ctx.in_commit(lambda tx: seen.append((world.read(tx), world.state_in(tx, ctx.case_id))))
        ctx.in_commit(lambda tx: world.write(tx, "two"))
        ctx.in_commit(lambda tx: seen.append(world.read(tx)))
        return {"new": True}

    kind.step("go")(go)
    cases = world.cases(kind)
    cases.execute(world.create(cases, {"new": False}), "go")
    assert seen == [(["one"], {"new": True}), ["one", "two"]]


@both
@pytest.mark.spec("cases", 19)
def test_an_ended_case_lists_and_executes_and_can_be_reopened(world):
    kind = world.type()
    kind.step("end")(lambda state, ctx: ctx.end() or state)
    kind.step("go")(lambda state, ctx: state)
    kind.step("reopen")(lambda state, ctx: ctx.reopen() or state)
    kind.step("both")(lambda state, ctx: ctx.end() or ctx.reopen() or state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    done = cases.execute(case_id, "end")
    assert (done.dormancy, done.ended_at) == ("ended", done.committed_at)
    assert world.get(cases, case_id).ended_at == done.ended_at
    assert world.journal(cases, case_id)[-1].dormancy == "ended"
    with world.begin() as tx:
        assert [one.step for one in cases.affordances(tx, case_id, actor=None)] == ["end", "go", "reopen", "both"]
    world.clock.advance(5)
    assert cases.execute(case_id, "go").ended_at == done.ended_at
    assert world.get(cases, case_id).ended
    assert cases.execute(case_id, "reopen").ended_at is None
    assert not world.get(cases, case_id).ended
    both = cases.execute(case_id, "both")
    assert (both.dormancy, both.ended_at, world.get(cases, case_id).ended) == ("reopened", None, False)


@both
@pytest.mark.spec("cases", 20)
def test_a_guard_that_changed_since_the_listing_refuses_with_what_is_unmet_now(world, sale):
    cases = world.cases(sale)
    case_id = world.create(cases, Sale())
    with world.begin() as tx:
        assert [one.step for one in cases.affordances(tx, case_id, actor="ann")] == ["offer", "sell"]
    cases.execute(case_id, "sell")
    before = world.everything()
    with pytest.raises(StepNotAvailable) as refused:
        cases.execute(case_id, "offer", actor="ann", input={"amount": 1})
    assert [str(one) for one in refused.value.unmet] == ["not sold: it is sold"]
    assert world.everything() == before


@both
@pytest.mark.spec("cases", 21)
def test_what_is_not_possible_and_what_is_not_permitted_are_told_apart(world):
    kind = world.type()
    kind.step("hers", permits={"is ann": lambda state, actor: actor == "ann"})(lambda state, ctx: state)
    kind.step("never", requires={"never": lambda state: False})(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(StepNotAvailable) as refused:
        cases.execute(case_id, "hers", actor="bob")
    assert (refused.value.possible, refused.value.permitted) == (True, False)
    with pytest.raises(StepNotAvailable) as refused:
        cases.execute(case_id, "never", actor="bob")
    assert (refused.value.possible, refused.value.permitted) == (False, True)
    assert cases.execute(case_id, "hers", actor="ann").seq == 1


class Track(BaseModel):
    buyer: str
    signed: bool = False


class TwoTracks(BaseModel):
    tracks: list[Track]


@both
@pytest.mark.spec("cases", 22)
def test_a_step_with_a_scope_changes_its_own_element_and_its_track_can_be_read_alone(world):
    kind = world.type(TwoTracks)
    scope = Scope(lambda state: [track for track in state.tracks if not track.signed], lambda track: track.buyer)

    def sign(state, ctx):
        assert ctx.element in state.tracks
        assert ctx.scope_key == ctx.element.buyer
        ctx.element.signed = True
        return state

    kind.step("sign", scope=scope)(sign)
    cases = world.cases(kind)
    case_id = world.create(cases, TwoTracks(tracks=[Track(buyer="ann"), Track(buyer="bob")]))
    done = cases.execute(case_id, "sign", scope_key="bob")
    assert done.delta == [{"op": "replace", "path": "/tracks/1/signed", "value": True}]
    assert done.state.tracks[0] == Track(buyer="ann")
    with pytest.raises(BadScopeKey) as bad:
        cases.execute(case_id, "sign", scope_key="bob")
    assert bad.value.keys == ("ann",)
    with pytest.raises(BadScopeKey):
        cases.execute(case_id, "sign")
    cases.execute(case_id, "sign", scope_key="ann")
    assert {e.scope_key for e in world.journal(cases, case_id, scope_key="ann")} == {"ann"}
    assert [e.number for e in world.journal(cases, case_id, scope_key="ann")] == [3, 4]
    assert [e.number for e in world.journal(cases, case_id, scope_key="ann", after=3)] == [4]
    with world.begin() as tx:
        twice = cases.create(tx, kind, TwoTracks(tracks=[Track(buyer="ann"), Track(buyer="ann")])).id
    with pytest.raises(BadScopeKey):
        cases.execute(twice, "sign", scope_key="ann")
    with world.begin() as tx:
        with pytest.raises(BadScopeKey):
            cases.affordances(tx, twice, actor=None)
        with pytest.raises(BadScopeKey):
            cases.explain(tx, twice, "sign", "ann")


@both
@pytest.mark.spec("cases", 23)
def test_busy_outranks_a_bad_name_and_bad_input_outranks_the_guard(world):
    kind = world.type()
    kind.step("crash")(crashing)
    kind.step("offer", input=Offer, requires={"never": lambda state: False})(offer)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    with pytest.raises(InvalidInput):
        cases.execute(case_id, "offer", input={})
    with pytest.raises(StepNotAvailable):
        cases.execute(case_id, "offer", input={"amount": 1})
    held(world, cases, case_id)
    with pytest.raises(CaseBusy):
        cases.execute(case_id, "missing")


@both
@pytest.mark.spec("cases", 24)
def test_input_is_refused_where_none_is_taken_and_filled_in_where_some_is(world, sale):
    cases = world.cases(sale)
    case_id = world.create(cases, Sale())
    before = world.everything()
    with pytest.raises(InvalidInput):
        cases.execute(case_id, "sell", input={"amount": 1})
    assert world.everything() == before
    seen = []
    other = world.type()
    other.step("offer", input=Offer)(lambda state, ctx: seen.append(ctx.input) or state)
    others = world.cases(other)
    other_id = world.create(others, {})
    others.execute(other_id, "offer", input={"amount": 1})
    assert seen == [Offer(amount=1, currency="EUR")]
    assert world.journal(others, other_id)[0].input == {"amount": 1, "currency": "EUR"}


@both
@pytest.mark.spec("cases", 40)
def test_an_actor_that_is_no_json_leaves_a_marker_and_fails_nothing(world):
    kind = world.type()
    seen = []
    kind.step("go")(lambda state, ctx: seen.append(ctx.actor) or state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    cycle: list = []
    cycle.append(cycle)
    for actor in (cycle, object(), {"of": object()}, {"a\x00b": 1}, "a\x00b"):
        cases.execute(case_id, "go", actor=actor)
        assert seen.pop() is actor
    assert world.get(cases, case_id).seq == 5
    assert {entry.actor["durable"] for entry in world.journal(cases, case_id)} == {"not stored"}


@both
def test_what_a_handler_changes_in_what_it_was_given_changes_nothing_but_what_it_returns(world):
    kind = world.type()
    before = {"list": [1]}
    actor = {"name": "ann"}

    def meddles(state, ctx):
        state["list"].append(ctx.attempt)
        assert ctx.actor == {"name": "ann"}
        ctx.actor["name"] = "eve"
        if ctx.attempt == 1:
            raise ValueError
        return {"list": state["list"]}

    kind.step("go", retry=Attempts(2, 0))(meddles)
    cases = world.cases(kind)
    case_id = world.create(cases, before)
    done = cases.execute(case_id, "go", actor=actor)
    assert done.state == {"list": [1, 2]}
    assert {e.actor["name"] for e in world.journal(cases, case_id)} == {"ann"}
    assert actor == {"name": "ann"}


@both
def test_an_unchanged_state_is_a_commit_with_an_empty_delta(world):
    kind = world.type()
    kind.step("go")(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {"a": 1.0, "b": [True, None]})
    done = cases.execute(case_id, "go")
    assert (done.delta, done.seq, done.state) == ([], 1, {"a": 1.0, "b": [True, None]})


@both
def test_a_correlation_takes_the_scope_key_of_its_step_unless_it_says_otherwise(world):
    kind = world.type()

    def go(state, ctx):
        ctx.correlate("sign", "own", metadata={"n": 1}, step="signed")
        ctx.correlate("sign", "case", scope_key=None)
        ctx.correlate("sign", "other", scope_key="b")
        with pytest.raises(ValueError, match="external_id"):
            ctx.correlate("sign", "")
        return state

    kind.step("go", scope=Scope(lambda state: state["of"], str))(go)
    cases = world.cases(kind)
    case_id = world.create(cases, {"of": ["a", "b"]})
    cases.execute(case_id, "go", scope_key="a")
    with world.begin() as tx:
        found = {name: cases.store.within(tx).correlation("sign", name) for name in ("own", "case", "other")}
    assert {name: one.scope_key for name, one in found.items()} == {"own": "a", "case": None, "other": "b"}
    assert (found["own"].metadata, found["own"].step, found["own"].case_id) == ({"n": 1}, "signed", case_id)
    cases.execute(case_id, "go", scope_key="b")
    with world.begin() as tx:
        again = cases.store.within(tx).correlation("sign", "own")
    assert (again.id, again.scope_key) == (found["own"].id, "b")


@both
def test_an_instant_is_taken_from_the_caller_or_from_the_clock(world):
    kind = world.type()
    seen = []
    kind.step("go", requires={"when": lambda state, as_of: seen.append(as_of) or True})(lambda state, ctx: state)
    cases = world.cases(kind)
    case_id = world.create(cases, {})
    now = world.clock.now()
    assert cases.execute(case_id, "go").guard.as_of == now
    given = now.replace(year=2031, microsecond=123456)
    cases.execute(case_id, "go", as_of=given)
    assert seen == [now, given]
    assert world.journal(cases, case_id)[2].as_of == given


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@both
def test_a_state_as_deep_as_may_be_is_committed_although_its_delta_is_deeper(world):
    kind = world.type()
    kind.step("deepen")(lambda state, ctx: {"x": nested(31)})
    kind.step("too deep")(lambda state, ctx: {"x": nested(32)})
    cases = world.cases(kind)
    case_id = world.create(cases, {"x": 0})
    assert cases.execute(case_id, "deepen").attempts == 1
    assert world.get(cases, case_id).state == {"x": nested(31)}
    assert world.journal(cases, case_id)[1].delta == [{"op": "replace", "path": "/x", "value": nested(31)}]
    with world.begin() as tx:
        assert cases.verify(tx, case_id).ok
    with pytest.raises(ExecutionFailed) as failed:
        cases.execute(case_id, "too deep")
    assert isinstance(failed.value.cause, InvalidState)


@both
def test_what_is_changed_in_an_entry_that_was_read_changes_no_journal(world):
    kind = world.type()
    kind.step("go")(lambda state, ctx: ctx.correlate("there", "1", metadata={"of": []}) or {"n": [1]})
    cases = world.cases(kind)
    case_id = world.create(cases, {"n": []})
    cases.execute(case_id, "go")
    claimed, completed = world.journal(cases, case_id)
    claimed.state["n"].append("mine")
    completed.delta.clear()
    claimed, completed = world.journal(cases, case_id)
    assert claimed.state == {"n": []}
    assert completed.delta == [{"op": "add", "path": "/n/-", "value": 1}]
