"""Shares the engine between API keys: a key with many requests does not starve one with few.

At most `max_sequences` sequences are in the engine, a little more than it computes in one step.
The others wait here, and the key with the least running work in proportion to its share is
next. Requests without a named key are not held here.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairShare:
    """The waiting requests of each key. Used on one event loop only."""

    def __init__(self, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._running: Counter[str] = Counter()
        self._shares: dict[str, float] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def enter(self, key: str, share: float, num_sequences: int) -> AsyncIterator[None]:
        """A context that is entered when `num_sequences` sequences of `key` may be in the
        engine. They are counted until its end."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shares[key] = share
        self._waiting.setdefault(key, deque()).append((num_sequences, granted))
        self._dispatch()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._running[key] -= num_sequences
            else:
                self._remove(key, granted)
            self._forget_idle(key)
            self._dispatch()

    def _dispatch(self) -> None:
        """Let waiting requests enter while there is room."""
        while self._waiting:
            key = min(self._waiting, key=lambda name: self._running[name] / self._shares[name])
            num_sequences, granted = self._waiting[key][0]
            if granted.cancelled():  # its request has ended and has not left the queue yet
                self._remove(key, granted)
                continue
            total = self._running.total()
            if total and total + num_sequences > self._max_sequences:
                return
            self._remove(key, granted)
            self._running[key] += num_sequences
            granted.set_result(None)

    def _remove(self, key: str, granted: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(key, deque())
        left = deque(entry for entry in queue if entry[1] is not granted)
        if left:
            self._waiting[key] = left
        else:
            self._waiting.pop(key, None)

    def _forget_idle(self, key: str) -> None:
        """Forget a key without requests: changes of the key file may bring any number of
        keys."""
        if not self._running[key] and key not in self._waiting:
            del self._running[key]
            self._shares.pop(key, None)
