"""Measured costs of steps, from which the scheduler chooses how many prompt tokens fit into one."""

import numpy as np
import pytest

from headwater.engine.pace import RateEstimator, StepCostEstimator
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.types import RequestId


def test_a_host_that_collects_late_does_not_raise_the_cost_of_a_decode_step():
    """Every fifth step seems twice as long, because another one was launched meanwhile. The
    target between tokens is a multiple of the cost of a step, so the cost must not follow such
    steps."""
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


def test_a_decode_step_of_unmeasured_size_takes_a_time_between_its_neighbours():
    """While many requests join, every step of the sizes in between also has prefills, so none
    of them is measured."""
    costs = StepCostEstimator()
    costs.note_decode(100, 0.006)
    costs.note_decode(1000, 0.030)
    costs.note_chunks(300, 100.0, 0.014)

    assert costs.costs.decode_s == pytest.approx(0.006 + 0.024 * (300 - 100) / (1000 - 100))


def test_the_time_that_the_device_measured_counts_not_when_the_host_collected():
    """Nearly every decode step is followed by a mixed one, whose launches delay its collection.
    An estimate from the times of collection would be too high in all of these steps: the time
    between tokens was 52 ms instead of 31."""
    rates = RateEstimator()
    for step in range(50):
        rates.note(make_decode(step), 0.1 * step, None, 0.1 * step)
        result = StepResult(
            step=step, tokens=np.ones(100, dtype=np.int32), logprobs=[], seconds=0.009
        )
        rates.note(None, 0.0, result, 0.1 * step + 0.020)

    assert rates.step_costs.costs.decode_s == pytest.approx(0.009)


def make_decode(step):
    """A step that decodes a hundred rows."""
    every = np.arange(101, dtype=np.int32)
    return ScheduledBatch(
        step=step,
        request_ids=[RequestId("")] * 100,
        tokens=every[:100],
        positions=every[:100],
        query_start=every,
        context_lens=every[1:],
        block_tables=[],
        sampled=every[:100],
        params=[],
        carry=every[:100],
    )
