"""Samples of a state over time, at fixed intervals, bounded in number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.replay.trace import TraceRequest

_NUM_SAMPLES = 240
_LEAST_S = 0.1

Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """The times of samples: from `start_s` on, every `every_s`."""

    start_s: float
    every_s: float

    @classmethod
    def of_trace(cls, requests: Sequence[TraceRequest]) -> "Times":
        """As many samples as a picture needs over the time of `requests`."""
        if not requests:
            return cls(0.0, _LEAST_S)
        start_s = requests[0].arrival_s
        return cls(start_s, max((requests[-1].arrival_s - start_s) / _NUM_SAMPLES, _LEAST_S))


class TimeSeries:
    """The samples of one owner of state. The owner calls `fill` at each event; all samples that
    are due then get the same state."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self.rows: list[Row] = []
        self._next_s = times.start_s

    def fill(self, now: float, row: Callable[[], Row]) -> None:
        """Fill the samples up to `now` that are not filled yet with the state that `row`
        returns."""
        if now < self._next_s:
            return
        taken = row()
        while self._next_s <= now:
            self.rows.append(taken)
            self._next_s = self._times.start_s + len(self.rows) * self._times.every_s


def summed(owners: Sequence[TimeSeries], width: int) -> list[list[float]]:
    """Columns of the sums over all owners; an owner that has ended keeps its last row."""
    length = max((len(owner.rows) for owner in owners), default=0)
    columns = [[0.0] * length for _ in range(width)]
    for owner in owners:
        for at in range(length if owner.rows else 0):
            row = owner.rows[min(at, len(owner.rows) - 1)]
            for column, value in zip(columns, row, strict=True):
                column[at] += value
    return columns
