"""The table of states and moves says what the contract says."""

from durable_core.states import DELIVERY_MOVES, PRUNED, TERMINAL, DeliveryState, FenceRule, SettleRule

MOVES = {(move.source, move.target): move for move in DELIVERY_MOVES}


def test_each_change_of_state_is_one_move():
    assert len(MOVES) == len(DELIVERY_MOVES)


def test_nothing_leaves_a_terminal_state_but_a_redrive():
    leaving = {(move.source, move.target) for move in DELIVERY_MOVES if move.source in TERMINAL}
    assert leaving == {("dead", "pending"), ("failed", "pending")}


def test_whatever_takes_work_away_raises_the_fence_and_nothing_else_does():
    raising = {key for key, move in MOVES.items() if move.fence is FenceRule.RAISED}
    assert raising == {
        ("pending", "processing"), ("pending", "canceled"), ("processing", "canceled"), ("dead", "pending"),
        ("failed", "pending"),
    }  # fmt: skip


def test_sent_and_failed_are_reached_by_a_settled_claim_only():
    for (_, target), move in MOVES.items():
        if target in (DeliveryState.SENT, DeliveryState.FAILED):
            assert move.settle is SettleRule.REQUIRED


def test_what_a_person_must_see_is_never_pruned():
    assert set(PRUNED) == TERMINAL - {DeliveryState.DEAD, DeliveryState.FAILED}
