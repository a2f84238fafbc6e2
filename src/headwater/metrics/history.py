"""The last minutes of a server: one point every two seconds, for all its HTTP workers together.

Points hold sums and percentiles only, so they show nothing of single requests or tenants.
"""

from collections import deque

from msgspec import Struct

from headwater.metrics.rates import Quantiles, ServerRates

INTERVAL_S = 2.0
SPAN_S = 600.0
"""The period that the charts show."""

MINUTE_S = 60.0
"""Percentiles cover this period before each point."""

_MAX_POINTS = int(SPAN_S / INTERVAL_S) + 30
"""A little more than the charts show, so that their left edge is never empty."""


class HistoryPoint(Struct, frozen=True, kw_only=True):
    """The activity of a server in one interval, and its state at the end."""

    unix_s: float
    """The end of the interval."""

    elapsed_s: float
    rates: ServerRates
    minute_ttft: Quantiles | None
    """Percentiles over the last minute, because an interval has too few requests for them."""

    minute_itl: Quantiles | None
    running: int
    waiting: int
    duplicates: int
    """Blocks that are on the device and on the host."""

    unwritten: int
    """Cached device blocks that the host does not have."""


class RateHistory:
    """The points of the last minutes, oldest first."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=_MAX_POINTS)

    def add(self, point: HistoryPoint) -> None:
        """Append a point; the oldest one is dropped when there is no room."""
        self._points.append(point)

    def after(self, unix_s: float) -> list[HistoryPoint]:
        """The points that are newer than `unix_s`."""
        return [point for point in self._points if point.unix_s > unix_s]
