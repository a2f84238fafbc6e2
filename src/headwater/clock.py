"""Time as a thing that is passed in, so that the simulator can pass another."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards."""

    def now(self) -> float:
        """Seconds since some fixed moment."""


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)  # no frame of our own: it is read several times a step


class VirtualClock:
    """A clock that stands still until told to move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; a clock never runs backwards."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} s")
        self._now_s += seconds

    def move_to(self, now_s: float) -> None:
        """Stand at `now_s`, exactly; a clock never runs backwards."""
        if now_s < self._now_s:
            raise ValueError(f"a clock cannot go back to {now_s} s from {self._now_s} s")
        self._now_s = now_s
