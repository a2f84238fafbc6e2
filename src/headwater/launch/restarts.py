"""How often a process may be started again."""

from collections import deque

WINDOW_S = 600.0
"""Time over which restarts are counted."""


class RestartBudget:
    """Allows at most `max_restarts` restarts within `WINDOW_S`."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self._times: deque[float] = deque()

    def take(self, now: float) -> int | None:
        """Count a restart and return how many came before it in the window; None if none is
        left."""
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self.max_restarts:
            return None
        self._times.append(now)
        return len(self._times) - 1
