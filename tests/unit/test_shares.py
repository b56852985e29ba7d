"""What a contract may add to a queue that it shares, by the depth of the queue and what waits there."""

import pytest

from durable_core.claims.shares import FEW, UNSURE_ROOM, Share, allot

CAP = 100


@pytest.mark.parametrize(
    ("depth", "own", "others", "share"),
    [
        (0, 30, [], Share(30, empty=True)),
        (0, 300, [], Share(CAP, empty=True)),
        (25, 30, [], Share(5)),
        (30, 30, [], Share(0)),
        (60, 30, [], Share(0)),
        (60, 30, [30], Share(0)),
        (59, 30, [30], Share(1)),
        (20, 30, [30], Share(30)),
        (60, 30, [20, 9], Share(0)),
        (58, 30, [20, 9], Share(1)),
        # Of more than are counted any number may lie there.
        (500, 30, [CAP], Share(30, unsure=True)),
        (50, 30, [CAP], Share(30)),
        (500, CAP, [CAP], Share(CAP, unsure=True)),
        # Few, behind whatever others left.
        (500, FEW, [], Share(FEW, unsure=True)),
        (500, FEW + 1, [], Share(0)),
        (FEW + 1, FEW, [], Share(FEW, unsure=True)),
        (FEW, FEW, [], Share(FEW)),
        (1, 1, [], Share(1)),
        # Of those alone that nobody may take now.
        (5, 0, [5], Share(0, unsure=True)),
        (0, 0, [], Share(0, unsure=True)),
    ],
)
def test_the_share_of_a_queue(depth, own, others, share):
    theirs = [{"mail": count, "elsewhere": 7} for count in others]
    assert allot({"mail": depth}, {"mail": own}, theirs, CAP) == {"mail": share}


def test_one_sweep_hints_so_many_unsure_and_no_more():
    share = allot({"mail": 50_000}, {"mail": 5000}, [{"mail": 10_000}], 10_000)["mail"]
    assert share == Share(UNSURE_ROOM, unsure=True)


def test_together_the_contracts_never_bring_a_queue_to_more_than_twice_its_rows():
    for one in range(11, 60, 7):
        for other in range(11, 60, 5):
            for depth in range(0, 2 * (one + other), 3):
                room = sum(
                    allot({"q": depth}, {"q": own}, [{"q": theirs}], CAP)["q"].room
                    for own, theirs in ((one, other), (other, one))
                )
                assert room == 0 or depth + room <= 2 * (one + other)
                assert room > 0 or depth >= one + other, "none is missing"
