"""Clocks. The time is passed in everywhere, so that the simulator can use a virtual clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A clock whose seconds never decrease."""

    def now(self) -> float:
        """Seconds since some fixed time."""


class SystemClock:
    """The machine's monotonic clock."""

    # without a Python frame, because it is read several times per step
    now = staticmethod(time.monotonic)


class VirtualClock:
    """A clock that moves only by `advance` and `move_to`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; a negative step is an error."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back {-seconds} s")
        self._now_s += seconds

    def move_to(self, now_s: float) -> None:
        """Move to exactly `now_s`; an earlier time is an error."""
        if now_s < self._now_s:
            raise ValueError(f"a clock cannot go back to {now_s} s from {self._now_s} s")
        self._now_s = now_s
