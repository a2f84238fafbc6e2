"""How fast a link is, learned from the jobs that ended on it."""

from headwater.types import LinkRate

_MEMORY = 0.95
"""Weight that an observation keeps with each later one."""

_STALE_S = 60.0
"""After each such time without a job, a link is taken to be twice as fast: one that was slow once
is tried again, and the slower it was, the later."""


class LinkMeter:
    """A line through the jobs seen lately: seconds over blocks, least squares."""

    def __init__(self) -> None:
        self._count = self._blocks = self._seconds = 0.0
        self._blocks_squared = self._products = 0.0
        self._last_s = 0.0

    def observe(self, num_blocks: int, busy_s: float, *, now: float) -> None:
        """A job of `num_blocks` took `busy_s`."""
        self._count = self._count * _MEMORY + 1
        self._blocks = self._blocks * _MEMORY + num_blocks
        self._seconds = self._seconds * _MEMORY + busy_s
        self._blocks_squared = self._blocks_squared * _MEMORY + num_blocks**2
        self._products = self._products * _MEMORY + num_blocks * busy_s
        self._last_s = now

    def rate(self, *, now: float, busy: bool = False) -> LinkRate | None:
        """The line; None before the first job. While the link is `busy`, a job that will measure it
        again is on its way, so that it is not tried by others."""
        if not self._blocks:
            return None
        line = self._line()
        num_stale = 0 if busy else int((now - self._last_s) / _STALE_S)
        if not num_stale:
            return line
        hope = 0.5 ** min(num_stale, 32)
        return LinkRate(line.latency_s * hope, line.block_s * hope)

    def _line(self) -> LinkRate:
        spread = self._count * self._blocks_squared - self._blocks**2
        if spread > 1e-6 * self._blocks**2:
            slope = (self._count * self._products - self._blocks * self._seconds) / spread
            start = (self._seconds - slope * self._blocks) / self._count
            if slope >= 0 and start >= 0:
                return LinkRate(start, slope)
        return LinkRate(0.0, self._seconds / self._blocks)
