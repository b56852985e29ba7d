"""Ending a claim of a step with no receipt of it, and asking the row what a doubtful COMMIT came to."""

from __future__ import annotations

import logging
import time

from durable_core.arguments import clean_text
from durable_core.claims.claim import LOCK_WAIT, Claim
from durable_core.database.commits import Resolved, resolve
from durable_core.database.statements import beside
from durable_core.database.transactions import DATABASE_ERRORS, Row, is_infrastructure, run, said
from durable_core.deliveries.report import TRIES
from durable_core.deliveries.worker import Outcome, Worker
from durable_core.states import PlanState

log = logging.getLogger("durable.run")
_statements = beside(__file__)


def release(worker: Worker, claim: Claim, to: PlanState, code: str, message: str) -> Outcome | None:
    """
    End the claim in one self-guarded statement: the step is to be taken again (executing), or the plan has failed.

    None when that is written; else why not: CLAIM_LOST, DONE where its commit had landed after all, UNKNOWN where the
    database did not answer.
    """
    doubtful = False
    for again in range(1, TRIES + 1):
        try:
            with worker.database.autocommit() as connection:
                rows = run(
                    connection, _statements.release, **claim.naming, lock_timeout=LOCK_WAIT, to_state=to.value,
                    error_code=clean_text(code, 100), error_message=clean_text(message),
                )  # fmt: skip
            if rows:
                return None
            break
        except DATABASE_ERRORS as error:
            if again == TRIES or not is_infrastructure(error):
                log.error(
                    "report_not_recorded",
                    extra={"row_id": claim.id, "kind": claim.kind, "fence": claim.fence, "error": said(error)},
                )
                return Outcome.UNKNOWN
            doubtful = True
            time.sleep(worker.pause(again))
    resolved, row = came_to(worker, claim)
    if resolved is not Resolved.COMMITTED or row is None:
        return Outcome.CLAIM_LOST
    # This claim has reported: a try of ours whose answer was lost, or its step's own commit.
    return None if doubtful and row["state"] == to else Outcome.DONE


def came_to(worker: Worker, claim: Claim) -> tuple[Resolved, Row | None]:
    return resolve(worker.database, _statements.resolve, claim.id, claim.fence, LOCK_WAIT)
