"""Reporting what did not succeed: one self-guarded statement, its answer looked up where it was lost."""

from __future__ import annotations

import logging
import time

from durable_core.arguments import clean_text
from durable_core.claims.claim import LOCK_WAIT, Claim
from durable_core.database.commits import Resolved, answer_lost, resolve
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Row, is_infrastructure, run, said
from durable_core.deliveries.ended import has_hook, tell_dead
from durable_core.deliveries.worker import Outcome, Worker
from durable_core.retry import Verdict, after_interruption, rescue_seconds
from durable_core.states import DeliveryState

log = logging.getLogger("durable.run")
_statements = beside(__file__)

TRIES = 3
"""How often a transaction that the machine room refused (deadlock, lock timeout) is tried again."""


def interrupt(worker: Worker, claim: Claim, code: str, message: str) -> Row | Outcome:
    """Give the row back without spending an attempt: one interruption, and dead when those are spent."""
    count = claim.interruptions + 1
    verdict = after_interruption(count, claim.max_interruptions, rescue_seconds(count, worker.random))
    dead = verdict.state is DeliveryState.DEAD
    return end(
        worker, claim, verdict, counted="interruption", move="release",
        code="WORKER_LOST" if dead else code, message=message,
    )  # fmt: skip


def end(
    worker: Worker, claim: Claim, verdict: Verdict, *, counted: str, move: str, code: str, message: str,
    waiting_for: str | None = None,
) -> Row | Outcome:  # fmt: skip
    """
    End the claim without success, in one self-guarded statement: state, due time, one count and a journal line.

    The row as it is now; or why nothing was written: CLAIM_LOST, SENT where the commit had
    landed after all, UNKNOWN where the database did not answer.
    """
    doubtful, hooked = False, verdict.state is DeliveryState.DEAD and has_hook(claim.kind)
    for again in range(1, TRIES + 1):
        try:
            with worker.database.transaction() if hooked else worker.database.autocommit() as connection:
                rows = run(
                    connection, _statements.release, **claim.naming, lock_timeout=LOCK_WAIT,
                    to_state=verdict.state.value, delay_seconds=verdict.delay_seconds, counted=counted, move=move,
                    error_code=clean_text(code, 100), error_message=clean_text(message), waiting_for=waiting_for,
                )  # fmt: skip
                if rows and hooked:
                    tell_dead(worker.database, connection, claim.kind, claim.id)
            if rows:
                return rows[0]
            break
        except DATABASE_ERRORS as error:
            if again == TRIES or not is_infrastructure(error):
                log.error(
                    "report_not_recorded",
                    extra={"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "error": said(error)},
                )
                return Outcome.UNKNOWN
            doubtful = doubtful or answer_lost(error)
            time.sleep(worker.pause(again))
    # No row: somebody else has it; or an earlier try landed and lost its answer; or a time limit struck after
    # COMMIT had been sent. The row tells them apart.
    resolved, row = came_to(worker, claim)
    if resolved is not Resolved.COMMITTED or row is None:
        return Outcome.CLAIM_LOST
    log.info("commit_resolved", extra={"row_id": claim.id, "kind": claim.kind, "resolved": row["state"]})
    if row["state"] == DeliveryState.SENT:
        return Outcome.SENT
    return row if doubtful else Outcome.CLAIM_LOST


def came_to(worker: Worker, claim: Claim) -> tuple[Resolved, Row | None]:
    return resolve(worker.database, _statements.resolve, claim.id, claim.fence, LOCK_WAIT)
