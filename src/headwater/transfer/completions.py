"""The one queue through which every executor says that a job ended, and how it wakes the loop.

    executor threads ── put ──▶ queue ── take ──▶ the loop
                          └──── signal ──▶ file descriptor that the loop sleeps on, in C

A completion is queued before the signal is given, and the signal is swallowed before the
queue is emptied, so none is ever slept through.
"""

import os
import select
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from headwater.cache import JobStatus
from headwater.types import JobId


class JobCompletion(NamedTuple):
    """What an executor says of a job, once; after TIMED_OUT once more, when it is quiet."""

    job: JobId
    status: JobStatus
    num_blocks: int = 0
    """Leading blocks that arrived whole."""

    busy_s: float = 0.0
    """How long it was worked on, waiting not counted."""

    reason: str = ""
    """Why it did not end well: a word for the statistics."""

    found: tuple[int, ...] = ()
    """Of a lookup: leading blocks that storage has, by path."""


class CompletionQueue:
    """`put` from any thread; everything else from the loop's thread only."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[JobCompletion | object] = SimpleQueue()
        self._posted: list[object] = []
        """What was found among the completions, and is for others."""
        self._signal: int | None = None
        """Made when somebody first wants to sleep on it."""
        self._in_use = Lock()
        """Nobody writes to a descriptor that is closed, and may be another file's by then."""

    def put(self, completion: JobCompletion) -> None:
        """A job ended."""
        self.post(completion)

    def post(self, event: object) -> None:
        """Something else happened, such as a peer's message; for `take_posted`."""
        self._queue.put(event)
        self.wake()

    def wake(self) -> None:
        """End the loop's sleep, if it sleeps; from any thread."""
        with self._in_use:
            if self._signal is not None:
                os.eventfd_write(self._signal, 1)

    @property
    def has_any(self) -> bool:
        return not self._queue.empty() or bool(self._posted)

    def take(self) -> list[JobCompletion]:
        """Those since the last call, in order. Never waits; only empty means empty."""
        taken: list[JobCompletion] = []
        # Nobody else takes, so what is not empty now is not empty then; and an exception for
        # every step without news would be the dearest part of it.
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if isinstance(event, JobCompletion):
                taken.append(event)
            else:
                self._posted.append(event)
        return taken

    def take_posted(self) -> list[object]:
        """What was posted before the last `take`, in order, each once."""
        posted, self._posted = self._posted, []
        return posted

    def fileno(self) -> int:
        """Readable while there may be completions; `clear` it before taking them."""
        if self._signal is None:
            self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self.has_any:
                os.eventfd_write(self._signal, 1)
        return self._signal

    def clear(self) -> None:
        """Swallow the signal, if there is one."""
        if self._signal is not None:
            try:
                os.eventfd_read(self._signal)
            except BlockingIOError:
                return

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is a signal, at most `timeout_s`; swallow it."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3 + 1)
        self.clear()

    def close(self) -> None:
        """Release the descriptor; completions that come later are kept and wake nobody."""
        with self._in_use:
            signal, self._signal = self._signal, None
            if signal is not None:
                os.close(signal)
