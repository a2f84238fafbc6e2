"""Which runs came back, and when: samples for learning, each ready when its age bin is over."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.cache.policy.hazard import EDGES, NUM_BINS, Ints

_MAX_LOGGED = 1 << 18
_NEVER = np.inf


class Batch(NamedTuple):
    """Samples: in its bin, a run of a class returned or did not."""

    classes: Ints
    bins: Ints
    returned: NDArray[np.bool_]


class Samples:
    """A log of runs in time order, and for each bin how far it has been learned from.

    A run is a sample of a bin once that bin is over and unless it returned before it, so runs
    that have not returned yet count for exactly as long as they were watched.
    """

    def __init__(self) -> None:
        self._base = 0
        """Number of the first run in the log."""
        self._count = 0
        self._born = np.zeros(1024)
        self._age = np.zeros(1024)
        """How old a run was when it returned."""
        self._class = np.zeros(1024, dtype=np.int64)
        self._next = np.zeros(NUM_BINS, dtype=np.int64)
        self._low = np.array(EDGES[:-1], dtype=np.float64)
        self._high = np.array(EDGES[1:], dtype=np.float64)

    def add(self, run_class: int, now: float) -> int:
        """A run was used now; its number."""
        at = self._count
        if at == len(self._born):
            self._make_room()
            at = self._count
        self._born[at] = now
        self._age[at] = _NEVER
        self._class[at] = run_class
        self._count = at + 1
        return self._base + at

    def came_back(self, number: int, now: float) -> None:
        """The run was used again, for the first time since."""
        at = number - self._base
        if at >= 0 and self._age[at] == _NEVER:
            self._age[at] = now - self._born[at]

    def ready(self, now: float) -> Batch:
        """The samples that became ready since this was asked last."""
        ends = np.searchsorted(self._born[: self._count], now - self._high, side="right")
        counts = np.maximum(ends - self._next, 0)
        bins = np.repeat(np.arange(NUM_BINS), counts)
        # Position within the samples of its bin, on top of where that bin's begin.
        first = np.cumsum(counts) - counts
        runs = np.arange(len(bins)) + (self._next - first)[bins]
        self._next += counts
        ages = self._age[runs]
        watched = ages >= self._low[bins]
        bins, runs = bins[watched], runs[watched]
        return Batch(self._class[runs], bins, ages[watched] < self._high[bins])

    def _make_room(self) -> None:
        """Forget what every bin has learned from, and what is too much; grow if need be."""
        drop = int(self._next.min())
        if self._count - drop >= _MAX_LOGGED:
            drop = self._count - _MAX_LOGGED // 2
        size = len(self._born)
        if self._count - drop > size // 2:
            size *= 2
        for name in ("_born", "_age", "_class"):
            old = getattr(self, name)
            new = np.zeros(size, dtype=old.dtype)
            new[: self._count - drop] = old[drop : self._count]
            setattr(self, name, new)
        self._base += drop
        self._count -= drop
        self._next = np.maximum(self._next - drop, 0)
