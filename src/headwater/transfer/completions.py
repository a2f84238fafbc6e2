"""The one queue of completions, and the signal that wakes the loop.

    executor threads ── put ──▶ queue ── take ──▶ the loop
                          └──── signal ──▶ file descriptor that the loop sleeps on, in C

An executor queues a completion before it gives the signal, and the loop clears the signal
before it empties the queue. So the loop never sleeps while a completion is waiting.
"""

import os
import select
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from headwater.cache import JobStatus
from headwater.types import JobId


class JobCompletion(NamedTuple):
    """The report of an executor about a job: one when the job ends, and after TIMED_OUT a
    second one when the executor is quiet."""

    job: JobId
    status: JobStatus
    num_blocks: int = 0
    """Leading blocks that were copied completely."""

    busy_s: float = 0.0
    """Seconds of work, without waiting."""

    reason: str = ""
    """Why the job failed: one word for the statistics."""

    found: tuple[int, ...] = ()
    """For a lookup: leading blocks that storage has, for each path."""


class CompletionQueue:
    """`put` from any thread; everything else from the loop's thread only."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[JobCompletion | object] = SimpleQueue()
        self._posted: list[object] = []
        """Posted items found among the completions, until `take_posted`."""
        self._signal: int | None = None
        """Created when the loop first sleeps on it."""
        self._in_use = Lock()
        """Held while the descriptor is written or closed: a write to a closed descriptor could
        reach another file that got the same number."""

    def put(self, completion: JobCompletion) -> None:
        """Report that a job ended."""
        self.post(completion)

    def post(self, event: object) -> None:
        """Queue another event, such as a message of a peer, for `take_posted`."""
        self._queue.put(event)
        self.wake()

    def wake(self) -> None:
        """Wake the loop if it sleeps. Any thread may call it."""
        with self._in_use:
            if self._signal is not None:
                os.eventfd_write(self._signal, 1)

    @property
    def has_any(self) -> bool:
        return not self._queue.empty() or bool(self._posted)

    def take(self) -> list[JobCompletion]:
        """The completions since the last call, in order. Never waits; an empty result means
        that the queue is empty."""
        taken: list[JobCompletion] = []
        # Only this thread takes from the queue, so it cannot become empty between the test and
        # the call. An exception in every step without completions would be the most expensive
        # part of the step.
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if isinstance(event, JobCompletion):
                taken.append(event)
            else:
                self._posted.append(event)
        return taken

    def take_posted(self) -> list[object]:
        """The items posted before the last `take`, in order, each once."""
        posted, self._posted = self._posted, []
        return posted

    def fileno(self) -> int:
        """A descriptor that is readable while there may be completions. `clear` it before
        taking them."""
        if self._signal is None:
            self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            if self.has_any:
                os.eventfd_write(self._signal, 1)
        return self._signal

    def clear(self) -> None:
        """Clear the signal."""
        if self._signal is not None:
            try:
                os.eventfd_read(self._signal)
            except BlockingIOError:
                return

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is a signal, at most `timeout_s`, and clear it."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        # One millisecond longer, so that the deadline has passed when this returns.
        poller.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3 + 1)
        self.clear()

    def close(self) -> None:
        """Release the descriptor. Later completions are kept but wake no thread."""
        with self._in_use:
            signal, self._signal = self._signal, None
            if signal is not None:
                os.close(signal)
