"""Reporting on an operation: one self-guarded statement, tried again until it is known what became of it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from durable_core.arguments import clean_text
from durable_core.claims.claim import LOCK_WAIT, Claim
from durable_core.claims.heartbeat import Held
from durable_core.database.commits import Resolved, answer_lost, resolve
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Row, is_infrastructure, run, said
from durable_core.deliveries.worker import Outcome, Worker
from durable_core.states import OperationState

log = logging.getLogger("durable.run")
_statements = beside(__file__)

OUTAGE_SECONDS = 30.0
"""A poll that was due for so long, or for half of the patience, and not made: then our own polling had stood still. So
it had where a poll's report comes so long after its lease and the answer of its hook."""
LONGEST_POLL_PAUSE = 30.0
"""A poll that fails is tried again after so long at most, whatever was before."""
JITTER = 0.1
"""Polls are a little later than asked for, never earlier: the provider's wait is kept."""
LONGEST_WAIT = 24 * 3600.0
"""No provider's word puts a poll off for longer."""


@dataclass(frozen=True)
class Report:
    """What an owner has to say. None leaves what the row has."""

    state: OperationState = OperationState.RUNNING
    external_ids: Sequence[str] | None = None
    statuses: Mapping[str, Any] | None = None
    answered: bool = False
    """The other side gave an answer to a poll, good or not."""
    renews: bool = False
    """Its patience runs anew: the other side was heard."""
    backs_off: bool = False
    provider_seconds: float = 0.0
    code: str | None = None
    message: str | None = None
    move: str | None = None
    """The journal's word for it; None for a poll that changed no state, which costs no line."""


def settle(
    worker: Worker, claim: Claim, held: Held, report: Report, *, asked: float, seconds: float = 0.0
) -> Row | Outcome:
    """
    End the claim with this report. The row as it is now; or CLAIM_LOST, where somebody else has a say; or UNKNOWN.

    For `asked` seconds since its claim the other side was waited for, so a report is late only after these. The report
    alone is tried again, for `seconds` at least: what it reports has happened, and must not be done again.
    """
    until = time.monotonic() + seconds
    again = 0
    while True:
        again += 1
        try:
            if again > 1:
                time.sleep(min(worker.pause(again - 1), 2.0))
            with worker.database.autocommit() as connection:
                rows = run(connection, _statements.settle, **claim.naming, **_told(worker, report, asked))
            if rows:
                return rows[0]
            return _resolved(worker, claim)
        except worker.time_limits:
            # It may have struck in the pause, or while a connection went in or out of the pool. What was answered is
            # still to be told.
            worker.database.renew()
        except DATABASE_ERRORS as error:
            if not is_infrastructure(error) or (again >= 3 and time.monotonic() >= until):
                log.error(
                    "report_not_recorded",
                    extra={"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "error": said(error)},
                )
                return Outcome.UNKNOWN
            if answer_lost(error):
                log.warning("report_in_doubt", extra={"row_id": claim.id, "kind": claim.kind, "error": said(error)})


def _resolved(worker: Worker, claim: Claim) -> Row | Outcome:
    """No row: somebody else has a say; or an earlier try landed and lost its answer. The row tells them apart."""
    resolved, row = resolve(worker.database, _statements.resolve, claim.id, claim.fence, LOCK_WAIT)
    if resolved is Resolved.COMMITTED and row is not None:
        log.info("commit_resolved", extra={"row_id": claim.id, "kind": claim.kind, "resolved": row["state"]})
        return row
    return Outcome.CLAIM_LOST


def _told(worker: Worker, report: Report, asked: float) -> dict[str, object]:
    return {
        "lock_timeout": LOCK_WAIT,
        "to_state": report.state.value,
        "external_ids": None if report.external_ids is None else json.dumps(list(report.external_ids)),
        "external_statuses": None if report.statuses is None else json.dumps(report.statuses),
        "answered": report.answered,
        "renews": report.renews,
        "backs_off": report.backs_off,
        "provider_seconds": min(report.provider_seconds, LONGEST_WAIT),
        "longest_seconds": LONGEST_POLL_PAUSE,
        "outage_seconds": OUTAGE_SECONDS,
        "asked_seconds": asked,
        "jitter": 1 + JITTER * worker.random(),
        "error_code": None if report.code is None else clean_text(report.code, 100),
        "error_message": report.message,
        "move": report.move,
    }


def remark_refused(worker: Worker, claim: Claim, reported: str) -> None:
    """The fence said no, and nothing was written; one journal line tells people what came too late."""
    facts = {"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "reported": reported}
    log.warning("stale_write_refused", extra=facts)
    try:
        with worker.database.autocommit() as connection:
            run(connection, _statements.remark_stale, **claim.naming, reason=f"LATE_{reported.upper()}")
    except DATABASE_ERRORS:
        log.warning("stale_remark_failed", extra=facts, exc_info=True)
