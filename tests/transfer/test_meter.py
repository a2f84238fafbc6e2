"""Link speeds: estimates follow what was measured."""

import pytest

from headwater.transfer.mover import LinkMeter, Mover
from headwater.types import LinkRate


def test_latency_and_block_time_are_fitted_from_jobs():
    """Jobs of different sizes give the latency and the seconds per block."""
    meter = LinkMeter()
    for num_blocks in (1, 4, 9, 2, 30):
        meter.observe(num_blocks, 0.01 + 0.002 * num_blocks, now=1.0)

    rate = meter.rate(now=2.0)

    assert rate is not None
    assert rate == pytest.approx((0.01, 0.002, 1))


def test_jobs_of_one_size_give_a_mean():
    """Jobs of one size cannot distinguish latency from speed."""
    meter = LinkMeter()
    meter.observe(4, 0.2, now=0.0)
    meter.observe(4, 0.4, now=0.0)

    rate = meter.rate(now=0.0)

    assert rate is not None
    assert rate.latency_s == 0.0
    assert rate.block_s == pytest.approx(0.075, rel=0.1)


def test_contradicting_measurements_become_a_mean():
    """Longer jobs that were faster do not make a negative price."""
    meter = LinkMeter()
    meter.observe(10, 0.1, now=0.0)
    meter.observe(1, 1.0, now=0.0)

    rate = meter.rate(now=0.0)

    assert rate is not None
    assert rate.latency_s == 0.0
    assert rate.block_s > 0


def test_a_link_that_was_slow_is_tried_again_after_a_while():
    """The link counts as twice as fast for each minute without a job, but not while a job is
    measuring it."""
    meter = LinkMeter()
    assert meter.rate(now=0.0) is None

    meter.observe(1, 100.0, now=0.0)

    assert meter.rate(now=59.0) == LinkRate(0.0, 100.0)
    assert meter.rate(now=61.0) == LinkRate(0.0, 50.0)
    assert meter.rate(now=121.0) == LinkRate(0.0, 25.0)
    assert meter.rate(now=121.0, busy=True) == LinkRate(0.0, 100.0)


def test_a_link_without_jobs_is_as_fast_as_its_opposite_direction():
    """Blocks are written before they are read, so the first load has a price."""
    mover = Mover()
    meter = LinkMeter()
    meter.observe(2, 1.0, now=0.0)
    mover._meters["device_to_host"] = meter

    assert mover.rate("host_to_device", now=1.0) == LinkRate(0.0, 0.5)
    assert mover.rate("storage_to_host", now=1.0) is None
