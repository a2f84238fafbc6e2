"""Expected and actual times of loads."""

import pytest

from headwater.scheduler.batch import StepBudget
from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.pacing import LoadForecasts, StepCosts

LINK = "host_to_device"
RATES = MeasuredRates(prefill_tokens_s=1000.0)


def make_forecasts() -> LoadForecasts:
    """A step of at most 256 tokens, in which decodes take 8 ms."""
    forecasts = LoadForecasts(256)
    forecasts.costs = StepCosts(decode_s=0.008)
    return forecasts


def test_a_load_that_starts_with_a_step_is_expected_after_it():
    """A transfer of 1 ms beside a step with two decodes and 100 prompt tokens takes as long as the
    step: 8 ms and 100 ms."""
    forecasts = make_forecasts()
    forecasts.step, forecasts.num_decodes = (
        StepBudget(num_tokens=256 - 2 - 100, num_places=8),
        2,
    )

    beside = forecasts.make(LINK, 0.001, RATES, now=0.0)
    forecasts.step = None
    alone = forecasts.make(LINK, 0.001, RATES, now=0.0)

    assert beside.transfer_s == pytest.approx(0.108)
    assert alone.transfer_s == pytest.approx(0.001)


def test_the_delay_of_a_link_is_learned():
    """Loads that always take 4 ms longer than their transfer are predicted after some of them;
    another link keeps its own delay."""
    forecasts = make_forecasts()

    for number in range(50):
        forecast = forecasts.make(LINK, 0.001, RATES, now=float(number))
        forecasts.compare(forecast, now=number + 0.005)

    assert forecasts.delay_s(LINK) == pytest.approx(0.004, rel=0.05)
    assert forecasts.delay_s("storage_to_host") == 0.0
    totals = forecasts.predictions.totals[LINK]
    assert totals.num == 50
    assert totals.expected_s < totals.actual_s == pytest.approx(0.25)


def test_one_late_load_changes_little():
    """A load that takes an hour adds at most a tenth of 10 ms to what is expected of the next."""
    forecasts = make_forecasts()

    forecasts.compare(forecasts.make(LINK, 0.001, RATES, now=0.0), now=3600.0)

    assert forecasts.delay_s(LINK) <= 0.001
