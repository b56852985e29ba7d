"""
Each statement that writes or locks a row of ours is raced by a test, or says why two sessions cannot meet there.

The table is by hand; the files are walked. A statement that is new, gone, or raced by a test that is gone fails here.
"""

import ast
import re
from pathlib import Path

import pytest

import durable_core

ROOT = Path(durable_core.__file__).parent
RACES = Path(__file__).parent

GUARDED = re.compile(
    r"\b(?:update durable\.|insert into durable\.|delete from durable\.|for (?:no key )?update|for key )"
)
"""What writes to a table of ours, or locks a row to be written by the next statement."""

CLAIMS, SWEEPS, SETTLES = "test_claims.py", "test_sweeps.py", "test_settle_orders.py"
LINES = "test_line_orders.py::test_of_a_line_one_at_a_time_and_the_first_that_is_committed_whoever_moves_its_head"
SETTLE = f"{SETTLES}::test_whatever_the_order_one_owner_settles_with_one_effect_and_the_loss_is_counted_as_it_was"
REPLACE = "test_replace_orders.py::test_a_claim_carries_out_what_its_row_says_and_the_newest_arguments_come_last"
OPERATIONS = "test_operation_orders.py::test_of_two_acts_at_once_each_is_whole_or_nothing"
SMALL = "test_small_races.py"
PLANS = "test_plan_races.py"
STEP = f"{PLANS}::test_whatever_the_order_of_a_step_and_a_heal_one_of_them_decides"
SHUTDOWN = f"{PLANS}::test_whatever_the_order_of_a_step_a_shutdown_and_the_next_owner_the_effect_is_there_once"

PLAN_ORDERS = "test_plan_orders.py::test_of_two_acts_at_once_each_is_whole_or_nothing"
READ_HEALS = f"{PLANS}::test_a_read_heals_beside_a_sweep_that_has_the_row_without_waiting"
READ_EXPIRES = f"{PLANS}::test_a_read_expires_beside_a_sweep_that_has_the_row_without_waiting"

RACED = {
    "deliveries/attempt.sql: take": f"{CLAIMS}::test_a_row_locked_elsewhere_is_skipped_and_not_waited_for",
    "deliveries/attempt.sql: take_due": (
        f"{CLAIMS}::test_eight_connections_claim_fifty_rows_each_exactly_once_and_nobody_blocks"
    ),
    "deliveries/attempt.sql: keep": f"{CLAIMS}::test_a_lease_renewed_while_the_reaper_looks_is_not_taken",
    "deliveries/attempt.sql: lock": SETTLE,
    "deliveries/attempt.sql: settle": SETTLE,
    "deliveries/attempt.sql: settle_alone": SETTLE,
    "deliveries/attempt.sql: remark_stale": (
        f"{SWEEPS}::test_a_row_that_is_pruned_while_a_late_report_is_refused_leaves_no_line_behind"
    ),
    "deliveries/attempt.sql: wait_for_handler": f"{SMALL}::test_a_remark_and_a_claim_do_not_wait_for_each_other",
    "deliveries/ended.sql: remark_hook": "no race: in the transaction that has made the row dead, and has it locked",
    "deliveries/enqueue.sql: insert": "no race: its id was drawn for it and is in nobody else's hands; it has no key",
    "deliveries/keys.sql: insert_keyed": "test_key_orders.py::test_two_callers_of_one_key_in_every_order",
    "deliveries/keys.sql: replace": REPLACE,
    "deliveries/keys.sql: give_up_key": REPLACE,
    "deliveries/operate.sql: redrive": f"{CLAIMS}::test_two_redrives_at_once_make_one_and_neither_waits",
    "deliveries/operate.sql: cancel": LINES,
    "deliveries/operate.sql: reschedule": LINES,
    "deliveries/operate.sql: discard": LINES,
    "deliveries/operate.sql: release": (
        f"{SWEEPS}::test_a_release_does_not_wait_for_the_reap_that_is_holding_the_row_back"
    ),
    "deliveries/paused.sql: pause": f"{SMALL}::test_of_two_pauses_at_once_one_is_in_force",
    "deliveries/paused.sql: resume": f"{SMALL}::test_of_two_resumes_at_once_one_ends_the_pause",
    "deliveries/report.sql: release": (
        f"{CLAIMS}::test_a_failure_report_that_waits_for_the_new_owners_claim_writes_nothing"
    ),
    "deliveries/report.sql: resolve": f"{SMALL}::test_a_doubt_waits_for_the_commit_that_it_is_about",
    "deliveries/stuck.sql: cut_off": (
        "no race: it ends the one session that has the row, by its name; of two at once each finds it there or gone"
    ),
    "deliveries/sweep.sql: unhinted": f"{SWEEPS}::test_two_dispatches_at_once_hint_each_row_once",
    "deliveries/sweep.sql: mark": f"{SWEEPS}::test_a_claim_does_not_wait_for_the_dispatch_that_is_marking_its_row",
    "deliveries/sweep.sql: lapsed": f"{CLAIMS}::test_two_reapers_at_once_take_each_row_once",
    "deliveries/sweep.sql: owned": f"{SWEEPS}::test_two_observers_of_one_death_at_once_count_it_once",
    "deliveries/sweep.sql: reap": f"{CLAIMS}::test_two_reapers_at_once_take_each_row_once",
    "deliveries/sweep.sql: hold": (
        f"{SWEEPS}::test_four_reapers_over_a_row_that_cannot_be_moved_hold_it_once_and_move_the_rest"
    ),
    "deliveries/sweep.sql: overdue": LINES,
    "deliveries/sweep.sql: expire": LINES,
    "deliveries/sweep.sql: discarded": f"{SMALL}::test_a_redrive_and_the_prune_of_a_discarded_row_do_not_wait",
    "deliveries/sweep.sql: old": f"{SWEEPS}::test_a_redrive_does_not_wait_for_the_prune_that_takes_the_row",
    "deliveries/sweep.sql: prune": f"{SWEEPS}::test_a_redrive_does_not_wait_for_the_prune_that_takes_the_row",
    "deliveries/sweep.sql: prune_journal": (
        f"{SWEEPS}::test_a_row_that_is_pruned_while_a_late_report_is_refused_leaves_no_line_behind"
    ),
    **dict.fromkeys(
        (
            "operations/attempt.sql: begin_precheck", "operations/attempt.sql: take",
            "operations/attempt.sql: take_again", "operations/attempt.sql: keep", "operations/attempt.sql: refuse",
            "operations/attempt.sql: put_off", "operations/attempt.sql: wait_for_handler",
            "operations/attempt.sql: lock_canceled", "operations/attempt.sql: ask_to_cancel",
            "operations/operate.sql: cancel", "operations/operate.sql: poll", "operations/operate.sql: release",
            "operations/report.sql: settle", "operations/report.sql: remark_stale",
            "operations/sweep.sql: unhinted", "operations/sweep.sql: mark", "operations/sweep.sql: lapsed",
            "operations/sweep.sql: owned", "operations/sweep.sql: take_back", "operations/sweep.sql: hold",
            "operations/sweep.sql: overdue", "operations/sweep.sql: expire", "operations/sweep.sql: old",
            "operations/sweep.sql: prune", "operations/sweep.sql: prune_journal",
        ),
        OPERATIONS,
    ),
    "operations/report.sql: resolve": "test_operation_orders.py::test_a_doubt_waits_for_the_report_that_it_is_about",
    "operations/sweep.sql: to_ask": "no race: it locks nothing; two at once hint twice, and `ask_to_cancel` decides",
    "operations/start.sql: insert": "test_operation_orders.py::test_of_two_starts_at_once_one_comes_to_be",
    "plans/attempt.sql: take": f"{PLANS}::test_a_claim_meets_another_claim",
    "plans/attempt.sql: keep": f"{PLANS}::test_a_beat_skips_a_row_that_somebody_has_and_renews_the_others",
    "plans/attempt.sql: lock": STEP,
    "plans/attempt.sql: settle": STEP,
    "plans/attempt.sql: remark_stale": PLAN_ORDERS,
    "plans/attempt.sql: wait_for_handler": PLAN_ORDERS,
    "plans/compensate.sql: compensable": f"{PLANS}::test_two_compensations_of_one_plan_at_once_are_one",
    "plans/heal.sql: stale": f"{PLANS}::test_two_heals_at_once_move_a_row_once",
    "plans/heal.sql: stale_one": READ_HEALS,
    "plans/heal.sql: overdue_one": READ_EXPIRES,
    "plans/heal.sql: heal": f"{PLANS}::test_two_heals_at_once_move_a_row_once",
    "plans/heal.sql: overdue": f"{PLANS}::test_an_approved_plan_is_claimed_or_expired_and_never_both",
    "plans/heal.sql: expire": f"{PLANS}::test_an_approved_plan_is_claimed_or_expired_and_never_both",
    "plans/heal.sql: hold": f"{PLANS}::test_a_release_by_an_operator_meets_a_sweep",
    "plans/operate.sql: approve": f"{PLANS}::test_nobody_waits_for_another_decision_and_what_it_comes_to_stands",
    "plans/operate.sql: reject": f"{PLANS}::test_nobody_waits_for_another_decision_and_what_it_comes_to_stands",
    "plans/operate.sql: release": f"{PLANS}::test_a_release_by_an_operator_meets_a_sweep",
    "plans/propose.sql: propose": f"{PLANS}::test_two_that_look_before_either_writes_propose_one_compensation",
    "plans/sweep.sql: unhinted": f"{PLANS}::test_two_dispatches_at_once_hint_each_step_once",
    "plans/sweep.sql: mark": f"{PLANS}::test_a_claim_does_not_wait_for_the_dispatch_that_marks_its_row",
    "plans/sweep.sql: owned": SHUTDOWN,
    "plans/sweep.sql: give_back": SHUTDOWN,
    "plans/sweep.sql: old": PLAN_ORDERS,
    "plans/sweep.sql: prune": PLAN_ORDERS,
    "plans/sweep.sql: prune_journal": PLAN_ORDERS,
    "plans/unsettled.sql: release": f"{PLANS}::test_a_release_meets_a_heal",
    "plans/unsettled.sql: resolve": PLAN_ORDERS,
}  # fmt: skip


def guarded() -> set[str]:
    found = set()
    for contract in ("deliveries", "plans", "operations"):
        for path in (ROOT / contract).glob("*.sql"):
            _, *parts = re.split(r"^-- name: (\w+)$", path.read_text(), flags=re.MULTILINE)
            for name, body in zip(parts[::2], parts[1::2], strict=True):
                if GUARDED.search(re.sub(r"--[^\n]*", "", body)):
                    found.add(f"{contract}/{path.name}: {name}")
    return found


def test_the_table_has_every_guarded_statement_and_no_other():
    assert guarded() - set(RACED) == set(), "raced by no test"
    assert set(RACED) - guarded() == set(), "no such statement"


@pytest.mark.parametrize("test", sorted({test for test in RACED.values() if not test.startswith("no race: ")}))
def test_each_race_is_there(test):
    file, _, name = test.partition("::")
    functions = [node.name for node in ast.parse((RACES / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


def test_what_is_not_raced_says_why():
    for statement, test in RACED.items():
        assert "::" in test or len(test.removeprefix("no race: ")) > 20, statement
