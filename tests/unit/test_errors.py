"""Errors survive pickling with their facts and their sentence."""

import pickle
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

import durable_core
from durable_core import document_refusals, errors, refusals
from durable_core.cli.exits import failure_of
from durable_core.demo.nemesis import RedisInUse
from durable_core.demo.run import DemoFailed
from durable_core.document_refusals import (
    ContentTooLarge,
    DocumentRefused,
    InvalidContent,
    SaveIdReused,
    UnknownDocument,
    UnknownRevision,
    VersionConflict,
)
from durable_core.errors import (
    ClaimLost,
    DefinitionError,
    DurableError,
    EffectEscaped,
    GiveUp,
    IdempotencyConflict,
    IllegalMove,
    InvalidArguments,
    InvalidOption,
    KeyInFlight,
    KeyTaken,
    NotATask,
    NotFound,
    NotInstalled,
    Retry,
    RowBusy,
    SchemaAhead,
    SchemaBehind,
    StepTransactionOwned,
    TooOldServer,
    UnknownHandler,
    UnsafePooler,
    UnsupportedTransaction,
)
from durable_core.local import LocalServicesError
from durable_core.refusals import (
    BadScopeKey,
    CaseBusy,
    CaseClaimLost,
    CaseNotFound,
    CaseRefused,
    ExecutionFailed,
    InvalidInput,
    InvalidState,
    Issue,
    Misfit,
    NotConfigured,
    OperationInFlight,
    PlanExpired,
    PlanRefused,
    SelfApproval,
    StalePlan,
    StepNotAvailable,
    TargetsUnresolved,
    UnknownCaseType,
    UnknownStep,
)


@dataclass(frozen=True)
class Guard:
    """As much of an evaluated guard as a refusal tells."""

    unmet: tuple[str, ...]
    possible: bool = False
    permitted: bool | None = None


ALL = [
    DefinitionError("a sentence"), NotInstalled("a sentence"), UnsupportedTransaction("builtins.int"),
    NotATask("k", "delay"),
    InvalidArguments("k", "n", "no"), InvalidOption("k", "eta", "no"), IdempotencyConflict("k", "key", "0198"),
    InvalidArguments("invoice.send", "arguments", "3 are too many", of_all=True),
    IdempotencyConflict("k", "key", None), KeyInFlight("k", "key", among=3),
    KeyInFlight("k", "key"), KeyTaken("k", "key", "0198"), KeyTaken("k", "key", None),
    UnknownHandler("k"), NotFound("delivery", "0198"),
    IllegalMove("redrive", "0198", "pending", "dead or failed"), RowBusy("redrive", "0198"),
    ClaimLost("0198", 3, 4), ClaimLost("0198", 3, None),
    StepTransactionOwned("commit"), EffectEscaped("0198"), SchemaBehind("durable", None, "0001"),
    SchemaBehind("durable", "0000", "0001"), SchemaAhead("durable", "9999", "0001"),
    TooOldServer("14.11"), UnsafePooler(),
    OperationInFlight("k", "0198"), OperationInFlight("k", None), NotConfigured("k"), TargetsUnresolved("k"),
    PlanRefused((Issue(None, "it has no step"), Issue(1, "a target is missing"))), StalePlan("0198"),
    PlanExpired("0198"), SelfApproval("0198", "dana"), IllegalMove("approve", "0198", "rejected", "pending", "plan"),
    RowBusy("approve", "0198", "plan"), ClaimLost("0198", 3, 4, "plan"), EffectEscaped("0198", "plan"),
    CaseNotFound("0198"), UnknownCaseType("sale", ("loan",)), UnknownCaseType("sale"),
    InvalidState("sale", (Misfit("price", "too low"), Misfit("", "not a sale"))),
    InvalidState("sale", (Misfit("price", "too low"),), "0198"),
    CaseBusy("0198", "0199", "sign", None, datetime(2026, 1, 1, tzinfo=UTC)),
    CaseClaimLost("0198", "0199", None), CaseClaimLost("0198", "0199", "019a"), UnknownStep("sale", "sing", ("sign",)),
    BadScopeKey("sale", "sign", "ann", "it is not selected", ("ben",)),
    InvalidInput("sale", "sign", (Misfit("", "no"),)),
    StepNotAvailable("0198", "sign", "ann", Guard(("offer is open",))), StepNotAvailable(None, "sign", None, Guard(())),
    ExecutionFailed("0198", "0199", "sign", None, 3, "ValueError", "no"),
    UnknownDocument("0198"), UnknownRevision("0198", 3),
    VersionConflict("0198", 3, 4, "dana", datetime(2026, 1, 1, tzinfo=UTC)),
    SaveIdReused("0198", 3, 4, "dana", datetime(2026, 1, 1, tzinfo=UTC)),
    InvalidContent("brief", (Misfit("title", "too long"),)), ContentTooLarge("brief", 500_001, 500_000),
]  # fmt: skip


OUTSIDE = [
    (LocalServicesError("a sentence"), "LOCAL_SERVICES"), (RedisInUse(), "REDIS_IN_USE"),
    (DemoFailed("a sentence"), "DEMO_FAILED"), (TooOldServer("14.11"), "SERVER_TOO_OLD"),
]  # fmt: skip


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_facts_and_its_sentence(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_a_reason_is_one_word_of_its_own_for_programs(error):
    assert error.reason.isupper()
    assert error.reason != DurableError.reason


def test_every_error_of_the_package_has_the_one_root_and_is_tested_here():
    things = [thing for module in (errors, refusals, document_refusals) for thing in vars(module).values()]
    declared = {thing for thing in things if isinstance(thing, type) and issubclass(thing, DurableError)}
    assert declared - {DurableError, CaseRefused, DocumentRefused} == {type(error) for error in ALL}


def test_what_a_server_too_old_needs_is_in_its_sentence():
    assert str(TooOldServer("14.11")) == "this is PostgreSQL 14.11; durable work needs PostgreSQL 15 or newer."


@pytest.mark.parametrize(("error", "reason"), OUTSIDE)
def test_the_rooms_that_bring_errors_of_their_own_have_the_same_root_and_a_reason(error, reason):
    """So that a command ends on them in one way, without a list of them."""
    failure = failure_of(error)
    assert isinstance(error, DurableError)
    assert (failure.code, failure.reason, failure.message) == (1, reason, str(error))


def test_what_a_handler_meets_is_at_the_front_door():
    assert {"ClaimLost", "StepTransactionOwned", "EffectEscaped"} <= set(durable_core.__all__)


def test_words_of_a_handler_survive_pickling():
    retry = pickle.loads(pickle.dumps(Retry("busy", after=timedelta(seconds=5), code="429")))
    assert (retry.message, retry.after, retry.code) == ("busy", 5, "429")
    given_up = pickle.loads(pickle.dumps(GiveUp("gone", code="410")))
    assert (given_up.message, given_up.code) == ("gone", "410")


@pytest.mark.parametrize("after", [float("nan"), float("inf"), "5"])
def test_retry_after_something_that_is_no_duration_is_refused_where_it_is_raised(after):
    with pytest.raises(ValueError, match="give seconds or a timedelta"):
        Retry(after=after)


def test_a_lost_claim_reads_as_a_sentence():
    assert str(ClaimLost("0198", 3, 4)).startswith("delivery 0198: fence 3 is stale or settled, current is 4")
    assert str(ClaimLost("0198", 3, 4, "plan")).startswith("plan 0198: fence 3 is stale or settled, current is 4")


def test_a_refused_plan_names_its_steps_as_people_count_them():
    refused = PlanRefused((Issue(None, "it has no step"), Issue(1, "a target is missing")))
    assert str(refused) == "the plan is refused: it has no step; step 2: a target is missing. Nothing was written."


def test_what_cases_refuse_has_one_of_seven_reasons_and_a_status():
    found = {(error.reason, error.http) for error in ALL if isinstance(error, CaseRefused)}
    assert found == {
        ("NOT_FOUND", 404), ("INVALID_STATE", 500), ("CASE_BUSY", 409), ("BAD_REQUEST", 400), ("INVALID_INPUT", 422),
        ("STEP_NOT_AVAILABLE", 409), ("EXECUTION_FAILED", 500),
    }  # fmt: skip


def test_what_documents_refuse_has_a_status():
    found = {(error.reason, error.http) for error in ALL if isinstance(error, DocumentRefused)}
    assert found == {
        ("NOT_FOUND", 404), ("VERSION_CONFLICT", 409), ("SAVE_ID_REUSED", 409), ("INVALID_CONTENT", 422),
        ("CONTENT_TOO_LARGE", 413),
    }  # fmt: skip


def test_a_stale_save_says_who_was_first_and_what_helps():
    said = str(VersionConflict("0198", 41, 42, "dana", datetime(2026, 11, 29, 14, 31, tzinfo=UTC)))
    assert "made from version 41, and version 42 was saved by dana at 2026-11-29T14:31:00+00:00" in said
    assert said.endswith("Nothing was written.")


def test_a_busy_case_says_who_is_at_it_and_until_when():
    busy = CaseBusy("0198", "0199", "sign", "ann", datetime(2026, 1, 1, 9, tzinfo=UTC))
    assert "execution 0199 is at step 'sign' for 'ann'" in str(busy)
    assert "2026-01-01T09:00:00+00:00" in str(busy)


def test_a_wrong_step_is_told_which_there_are_but_not_hundreds():
    assert "there is 'sign', 'pay'." in str(UnknownStep("sale", "sing", ("sign", "pay")))
    keys = tuple(f"buyer {n}" for n in range(1000))
    said = str(BadScopeKey("sale", "sign", "ann", "it is not selected", keys))
    assert "'buyer 19' and 980 more" in said
    assert "'buyer 20'" not in said
    long = "x" * 10_000
    assert len(str(UnknownStep("sale", long, (long,) * 30))) < 2000
    assert len(str(BadScopeKey("sale", "sign", long, "it is not selected", (long,) * 30))) < 2000


def test_a_failed_execution_has_its_cause_and_does_not_tell_its_text():
    with pytest.raises(ExecutionFailed) as failed:
        raise ExecutionFailed("0198", "0199", "sign", None, 1, "ValueError", "account 4711") from ValueError("4711")
    assert isinstance(failed.value.cause, ValueError)
    assert failed.value.message == "account 4711"
    assert "4711" not in str(failed.value)
