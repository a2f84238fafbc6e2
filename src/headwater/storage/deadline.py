"""A moment after which a storage call is no longer waited for."""

from headwater.clock import Clock
from headwater.errors import StorageTimeout


class Deadline:
    """Time left of one call."""

    __slots__ = ("_clock", "_end_s", "_what")

    def __init__(self, clock: Clock, timeout_s: float, what: str) -> None:
        self._clock = clock
        self._end_s = clock.now() + timeout_s
        self._what = what

    def left_s(self) -> float:
        """Seconds left, more than none; raises StorageTimeout afterwards."""
        left = self._end_s - self._clock.now()
        if left <= 0:
            raise self.passed()
        return left

    def passed(self) -> StorageTimeout:
        """The timeout error. Raise it only when the call no longer uses its buffers."""
        return StorageTimeout(f"{self._what} did not answer in time")
