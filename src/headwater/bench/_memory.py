"""Memory of this process over time: samples, and whether they grow."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAX_SAMPLES = 600
_FLAT_SHARE = 1e-4
"""Growth per minute, as a share of the total, below which a series counts as flat."""

_SERIES = ("heap_objects", "heap_blocks", "rss_mib", "mapped_mib", "malloc_mib")

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_NUMPY_SIZES, _NUMPY_KEPT = 1024, 8
"""NumPy keeps seven freed buffers of each size below 1 KiB for later arrays. Freeing eight of
each size fills this cache."""


class MemorySamples:
    """Seconds, objects and blocks of the Python heap, resident and mapped bytes, and bytes that the
    C library has allocated; at most 600 rows.

    Pages of mapped memory become resident when they are first used, so resident memory
    approaches the mapped memory for a long time, even if nothing leaks; Python keeps such pages
    in its own pools. With PYTHONMALLOC=malloc all memory of Python comes from the C library:
    `malloc_mib` then counts every byte in use, and `rss_mib` only pages with a byte in use.
    """

    def __init__(self) -> None:
        # One array from the start, with all its pages written: a list that grows, or pages that
        # become resident with the first sample in them, would appear as growth of the process.
        self._rows = np.full((_MAX_SAMPLES, 1 + len(_SERIES)), -1.0)
        _fill_numpy_cache()
        self._count = 0
        self._every = 1
        self._num_calls = 0

    @property
    def rows(self) -> NDArray[np.float64]:
        """The samples so far."""
        return self._rows[: self._count]

    def add(self, now_s: float) -> None:
        """Take a sample, after a full collection and with unused memory given back. When there are
        many, every second one is kept and samples are taken half as often."""
        self._num_calls += 1
        if self._num_calls % self._every:
            return
        if self._count == _MAX_SAMPLES:
            self._count //= 2
            self._rows[: self._count] = self._rows[::2].copy()
            self._every *= 2
        gc.collect()
        _give_back()
        heap = len(gc.get_objects()), sys.getallocatedblocks()
        row = (now_s, *heap, resident_bytes(), mapped_bytes(), allocated_bytes())
        self._rows[self._count] = row
        self._count += 1

    def report(self) -> dict[str, Any]:
        """For each series: the first and the last value, and the slope over the second half
        of the time with twice its standard error. A slope smaller than this error counts as
        zero. `correlation` is the correlation of successive samples; it widens the error."""
        # half of the time, not of the samples: rounds take longer while the machine is busy
        half = self.rows[2 * self.rows[:, 0] >= self.rows[-1:, 0]]
        if len(half) < 4:
            return {"memory_samples": self._count}
        report: dict[str, Any] = {"memory_samples": self._count}
        for column, name in enumerate(_SERIES, start=1):
            scale = 1 / (1 << 20) if name.endswith("_mib") else 1.0
            slope, error, correlation = _slope(half[:, 0] / 60, half[:, column] * scale)
            report[name] = {
                "first": float(self.rows[0, column]) * scale,
                "last": float(self.rows[-1, column]) * scale,
                "slope_per_minute": slope,
                "two_standard_errors": 2 * error,
                "correlation": correlation,
                "is_flat": bool(
                    slope <= max(2 * error, _FLAT_SHARE * half[-1, column] * scale)
                ),
            }
        return report

    def series(self) -> list[list[float]]:
        """All samples, for a plot: seconds, objects, heap blocks, resident, mapped and allocated
        bytes."""
        series: list[list[float]] = self.rows.tolist()
        return series


def resident_bytes() -> int:
    """Memory of this process that is in main memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def mapped_bytes() -> int:
    """Memory of this process for data, whether it was used yet or not."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * _PAGE_BYTES


def allocated_bytes() -> int:
    """Bytes in use that came from the C library's `malloc`; 0 if the library cannot tell."""
    with contextlib.suppress(AttributeError, OSError):
        usage: Callable[[], _MallocUsage] = ctypes.CDLL(None).mallinfo2
        usage.restype = _MallocUsage  # type: ignore[attr-defined]
        found = usage()
        return int(found.uordblks + found.hblkhd)
    return 0


class _MallocUsage(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _fill_numpy_cache() -> None:
    """Fill NumPy's cache of freed buffers. Otherwise each size that occurs for the first time
    would add to the cache, for hours."""
    for size in range(1, _NUMPY_SIZES):
        buffers = [np.empty(size, dtype=np.uint8) for _ in range(_NUMPY_KEPT)]
        del buffers


def _give_back() -> None:
    """Return free memory of the C library to the system, if the library can. Otherwise resident
    memory is that of the largest round so far, which grows for a long time although nothing
    leaks."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """Least squares: the slope, its standard error, and the correlation of successive residuals.

    The amount of memory often stays equal for many samples, so samples are not independent.
    With a correlation r of successive residuals, n samples count as n (1 - r) / (1 + r).
    """
    spread = x - x.mean()
    total = float((spread**2).sum())
    if not total:
        return 0.0, 0.0, 0.0
    slope = float((spread * y).sum()) / total
    residuals = y - y.mean() - slope * spread
    squares = float((residuals**2).sum())
    if not squares:
        return slope, 0.0, 0.0
    correlation = float((residuals[1:] * residuals[:-1]).sum()) / squares
    correlation = max(0.0, correlation)
    error = np.sqrt(squares / max(len(x) - 2, 1) / total)
    return slope, float(error * np.sqrt((1 + correlation) / (1 - correlation))), correlation
