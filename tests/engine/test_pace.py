"""Measured costs of steps, from which the scheduler chooses how many prompt tokens fit into one."""

import pytest

from headwater.engine.pace import StepCostEstimator


def test_a_host_that_collects_late_does_not_raise_the_cost_of_a_decode_step():
    """Every fifth step seems twice as long, because another one was launched meanwhile. The
    target between tokens is a multiple of this cost, so it must not follow."""
    costs = StepCostEstimator()
    for number in range(200):
        costs.note_decode(100, 0.020 if number % 5 == 4 else 0.009)

    assert costs.costs.decode_s == pytest.approx(0.009, rel=0.15)


def test_the_cost_of_a_decode_step_follows_steps_that_stay_slower_or_faster():
    """Contexts grow, and other work on the device begins and ends."""
    costs = StepCostEstimator()
    costs.note_decode(100, 0.009)
    for _ in range(150):
        costs.note_decode(100, 0.018)
    assert costs.costs.decode_s == pytest.approx(0.018, rel=0.05)

    for _ in range(20):
        costs.note_decode(100, 0.009)
    assert costs.costs.decode_s == pytest.approx(0.009, rel=0.05)


def test_decode_steps_are_measured_by_their_number_of_rows():
    """Ten rows are not expected to take as long as a thousand."""
    costs = StepCostEstimator()
    costs.note_decode(1000, 0.030)
    costs.note_decode(10, 0.005)

    assert costs.costs.decode_s == pytest.approx(0.005)
