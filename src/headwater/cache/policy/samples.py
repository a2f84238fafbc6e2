"""Training samples: which runs were used again, and when. A sample is ready when its age bin is
over."""

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.cache.policy.hazard import EDGES, NUM_BINS, Ints

_MAX_LOGGED = 1 << 18
_NEVER = float("inf")


class Batch(NamedTuple):
    """Samples: whether a run of a class was used again in its bin."""

    classes: Ints
    bins: Ints
    returned: NDArray[np.bool_]


class HazardSamples:
    """A log of runs in time order, and for each bin the position up to which it was learned.

    A bin is a range of ages. A run becomes a sample of a bin when the time since its use exceeds
    that range. A run that was used again at a lower age is not a sample of the bin. A run that
    was not used again yet is a sample of all bins that have passed.
    """

    def __init__(self) -> None:
        self._base = 0
        """Number of the first run in the log."""
        # Plain lists: for single entries they are three times as fast as numpy arrays.
        self._born = array("d")
        self._age = array("d")
        """Age of each run when it was used again."""
        self._class = array("q")
        self._next = np.zeros(NUM_BINS, dtype=np.int64)
        self._low = np.array(EDGES[:-1], dtype=np.float64)
        self._high = np.array(EDGES[1:], dtype=np.float64)

    def __len__(self) -> int:
        return len(self._born)

    def add(self, run_class: int, now: float) -> int:
        """Record that a run was used now, and return its number."""
        self._born.append(now)
        self._age.append(_NEVER)
        self._class.append(run_class)
        return self._base + len(self._born) - 1

    def came_back(self, number: int, now: float) -> None:
        """Record that the run `number` was used again; only the first time counts."""
        at = number - self._base
        if at >= 0 and self._age[at] == _NEVER:
            self._age[at] = now - self._born[at]

    def ready(self, now: float) -> Batch:
        """The samples that became ready since the last call."""
        ends = np.searchsorted(np.frombuffer(self._born), now - self._high, side="right")
        counts = np.maximum(ends - self._next, 0)
        bins = np.repeat(np.arange(NUM_BINS), counts)
        # Position among the samples of its bin, plus the start of that bin's samples.
        first = np.cumsum(counts) - counts
        runs = np.arange(len(bins)) + (self._next - first)[bins]
        self._next += counts
        ages = np.frombuffer(self._age)[runs]
        watched = ages >= self._low[bins]
        bins, runs = bins[watched], runs[watched]
        classes = np.frombuffer(self._class, dtype=np.int64)[runs]
        batch = Batch(classes, bins, ages[watched] < self._high[bins])
        self._forget()
        return batch

    def _forget(self) -> None:
        """Drop runs that every bin has learned from, and runs above the limit. Does nothing
        until there are many of them, because it moves the rest of the log."""
        drop = max(int(self._next.min()), len(self._born) - _MAX_LOGGED)
        if drop > len(self._born) // 2 or drop > _MAX_LOGGED // 8:
            for log in (self._born, self._age, self._class):
                del log[:drop]
            self._base += drop
            self._next = np.maximum(self._next - drop, 0)
