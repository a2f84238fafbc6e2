"""Memory samples of the soak: bounded, and a leak is distinguished from noise."""

import gc

import numpy as np
import pytest

from headwater.bench import _memory
from headwater.bench._memory import MemorySamples


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory of the process in bytes, from a script; the last entry is repeated."""
    sizes = [100 << 20]
    monkeypatch.setattr(_memory, "resident_bytes", lambda: sizes[-1])
    monkeypatch.setattr(_memory, "mapped_bytes", lambda: 2 * sizes[-1])
    monkeypatch.setattr(_memory, "allocated_bytes", lambda: 3 * sizes[-1])
    monkeypatch.setattr(gc, "get_objects", list)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    return sizes


def test_a_leak_has_a_positive_slope_and_noise_does_not(resident: list[int]) -> None:
    """One MiB per minute is found among noise of one MiB; noise alone is flat."""
    noise = np.random.default_rng(1).normal(0, 1 << 20, 400)
    for leak, is_flat in ((0, True), (1 << 20, False)):
        samples = MemorySamples()
        for number, one in enumerate(noise):
            resident.append(int((100 << 20) + one + leak * number / 10))
            samples.add(6.0 * number)
        report = samples.report()
        rss, mapped = report["rss_mib"], report["mapped_mib"]
        assert rss["is_flat"] is mapped["is_flat"] is is_flat
        assert rss["slope_per_minute"] == pytest.approx(leak / (1 << 20), abs=0.05)
        assert mapped["slope_per_minute"] == pytest.approx(2 * rss["slope_per_minute"])


def test_memory_that_moves_in_steps_is_no_leak(resident: list[int]) -> None:
    """Successive samples are correlated, so a random walk has a slope. The standard error
    includes the correlation; without it, half of such series would count as leaks."""
    flat = 0
    for seed in range(20):
        dice, noise = np.random.default_rng(seed), 0.0
        samples = MemorySamples()
        for number in range(400):
            noise = 0.95 * noise + dice.normal(0, 1 << 20)
            resident.append(int((100 << 20) + noise))
            samples.add(6.0 * number)
        rss = samples.report()["rss_mib"]
        assert rss["correlation"] > 0.8
        flat += rss["is_flat"]
    assert flat >= 18


def test_the_second_half_is_one_of_time(resident: list[int]) -> None:
    """Memory grows until all caches are full. The second half of the samples may begin before,
    because rounds do not take equally long; so the slope is of the second half of the time."""
    samples = MemorySamples()
    for now_s in (*range(1500), *range(1500, 3000, 10)):
        resident.append((100 << 20) + (min(now_s, 1400) << 10))
        samples.add(float(now_s))
    assert samples.report()["rss_mib"]["slope_per_minute"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.skipif(not _memory.allocated_bytes(), reason="needs glibc")
def test_allocated_bytes_count_what_the_process_holds() -> None:
    """A leak of a C library is seen at once, whether its pages were touched or not."""
    before = _memory.allocated_bytes()
    held = np.empty(8 << 20, dtype=np.uint8)

    assert _memory.allocated_bytes() - before >= held.nbytes


def test_samples_are_bounded_and_cover_the_whole_time(resident: list[int]) -> None:
    """A soak of days keeps 600 rows at most, evenly over its time."""
    samples = MemorySamples()
    for number in range(5000):
        samples.add(float(number))

    times = [row[0] for row in samples.series()]
    assert 300 <= len(times) <= 600
    assert times[-1] > 4900
    assert max(np.diff(times)) <= 32
