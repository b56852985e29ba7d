"""Policy: how long to wait, and what a failure or a lost worker means."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable_core.errors import DefinitionError
from durable_core.retry import (
    LONGEST_DELAY_SECONDS,
    RESCUE,
    Backoff,
    after_failure,
    after_interruption,
    rescue_seconds,
    spread,
)

POLICIES = st.builds(
    Backoff,
    base=st.floats(0.001, 100),
    factor=st.floats(1, 1e6),
    cap=st.floats(100, LONGEST_DELAY_SECONDS),
    jitter=st.floats(0, 0.99),
)


def test_the_default_back_off_is_the_one_the_contract_tells():
    assert [Backoff().seconds(k) for k in (1, 2, 3, 4, 5, 6, 1000)] == [30, 120, 480, 1920, 3600, 3600, 3600]


def test_the_failure_is_floored_and_at_least_1():
    assert Backoff().seconds(0) == Backoff().seconds(-7) == Backoff().seconds(1.9) == 30
    assert Backoff().seconds(2.9) == 120


@given(POLICIES, st.integers(-5, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_never_negative_nor_past_its_cap_and_jitter(policy, failure, drawn):
    plain = policy.seconds(failure)
    assert 0 < plain <= policy.cap
    delay = policy.jittered(failure, lambda: drawn)
    assert plain * (1 - policy.jitter) * 0.999 <= delay <= plain * (1 + policy.jitter) * 1.001


def test_a_factor_barely_above_1_reaches_the_cap_too():
    assert Backoff(base=1, factor=1.001).seconds(10**6) == 3600


def test_whole_numbers_are_not_worked_out_to_the_last_digit():
    assert Backoff(base=1, factor=2).seconds(10**12) == 3600


@given(POLICIES, st.integers(1, 2000))
def test_delays_grow_until_the_cap(policy, failure):
    assert policy.seconds(failure) <= policy.seconds(failure + 1)


def test_jitter_spreads_by_15_percent_either_way_also_at_the_cap(seed):
    draw = random.Random(seed).random
    delays = [Backoff().jittered(50, draw) for _ in range(500)]
    assert min(delays) >= 3600 * 0.85
    assert max(delays) <= 3600 * 1.15
    assert len(set(delays)) > 400
    assert spread(10, 0.15, lambda: 0.0) == 8.5
    assert spread(10, 0.15, lambda: 0.5) == 10


@pytest.mark.parametrize(
    "terms",
    [
        {"base": 0}, {"base": -1}, {"base": 10, "cap": 5}, {"factor": 0.5}, {"jitter": 1}, {"jitter": -0.1},
        {"cap": 10**9}, {"base": float("nan")}, {"cap": float("inf")},
    ],
)  # fmt: skip
def test_a_back_off_that_cannot_work_is_a_definition_error(terms):
    with pytest.raises(DefinitionError):
        Backoff(**terms)


def test_a_rescue_waits_nothing_the_first_time_then_doubles_up_to_an_hour():
    middle = [rescue_seconds(k, lambda: 0.5) for k in (0, 1, 2, 3, 4, 9, 10, 5000)]
    assert middle == [0, 0, 30, 60, 120, 3600, 3600, 3600]
    assert RESCUE.jitter > 0, "rescues are spread too"


@given(st.integers(1, 100), st.integers(1, 100), st.floats(allow_nan=False))
def test_a_failure_ends_dead_exactly_when_the_budget_is_spent(failure, most, delay):
    verdict = after_failure(failure, most, delay)
    assert verdict.state == ("dead" if failure >= most else "pending")
    assert 0 <= verdict.delay_seconds <= LONGEST_DELAY_SECONDS


@given(st.integers(1, 100), st.integers(0, 100))
def test_interruptions_allowed_are_survived_and_the_next_one_is_not(interruptions, most):
    assert after_interruption(interruptions, most, 1.0).state == ("dead" if interruptions > most else "pending")
