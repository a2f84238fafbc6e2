"""Threads that run calls which may hang, so that their caller can stop waiting.

A call in the kernel or in a C++ library cannot be interrupted. It runs in one of these threads.
When its deadline passes, the caller gets StorageTimeout with an event that is set when the call
has returned. Until then its thread is lost; another thread replaces it, up to a bound. A lost
thread runs only on cores that are idle otherwise, because some libraries wait in a busy loop: a
Mooncake call whose peer is stopped takes a whole core for a minute. With the lowest priority
alone, lost threads would still get a share of each core, and other threads would wait for their
time slices.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread, get_native_id
from typing import Generic, TypeVar

from headwater.errors import StorageError, StorageTimeout

T = TypeVar("T")

MAX_LOST = 16
"""Lost threads of one backend that are replaced."""


class IoThreads:
    """Daemon threads: a hung one never keeps the process from exiting.

    `num_threads` of them accept calls, unless more than MAX_LOST hang in calls that have passed
    their deadline.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
        self._closed = False
        self._changed = Condition()
        """Protects the counts; notified when a call ends."""
        self._num_alive = 0
        self._num_running = 0
        self._num_lost = 0

    @property
    def num_lost(self) -> int:
        """Threads that hang in a call which has passed its deadline."""
        return max(self._num_lost, 0)

    def run(self, calls: Sequence[Callable[[], T]], *, timeout_s: float) -> list[T]:
        """The results of all calls, in order, or the first error. After `timeout_s` it raises
        StorageTimeout: calls that have not begun never begin, and `quiet` is set when those
        that had begun have ended."""
        if not calls:
            return []
        self._start()
        group = _Group(calls)
        for place in range(len(calls)):
            self._queue.put(lambda place=place: group.run(place))  # type: ignore[misc]
        if not group.quiet.wait(timeout_s):
            self._lose(group.abandon())
            raise StorageTimeout(
                f"{self._name} did not answer within {timeout_s:g} s", quiet=group.quiet
            )
        return group.results()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no call is running; False if one still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_running, timeout_s)

    def close(self) -> None:
        """Let every thread end after its current call; wait for none."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for _ in range(self._num_alive):
                    self._queue.put(None)

    def _start(self) -> None:
        with self._changed:
            if self._closed:
                raise StorageError(f"{self._name} is closed")
            while self._num_alive < self._num_wanted():
                self._num_alive += 1
                Thread(target=self._work, name=self._name, daemon=True).start()

    def _num_wanted(self) -> int:
        """The number of threads that should exist, including lost ones."""
        return self._num_threads + min(max(self._num_lost, 0), MAX_LOST)

    def _lose(self, threads: list[int]) -> None:
        with self._changed:
            self._num_lost += len(threads)
        if sys.platform != "linux":  # elsewhere the id would be taken for that of a process
            return
        for thread in threads:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._changed:
                self._num_running += 1
            was_lost = call()
            del call  # it holds buffers and files, and the next call may come much later
            with self._changed:
                self._num_running -= 1
                self._num_lost -= was_lost
                self._changed.notify_all()
                if was_lost:
                    # This thread may not leave the idle policy again, and a thread that it
                    # started would inherit the policy. So it ends, and the next `run` starts a
                    # new one.
                    self._num_alive -= 1
                    return


class _Group(Generic[T]):
    """The calls of one `run`: which have begun, and their results."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.quiet = Event()
        self._calls = calls
        self._results: list[T | BaseException | None] = [None] * len(calls)
        self._lock = Lock()
        self._waiting = len(calls)
        self._running: dict[int, int] = {}
        """System ids of the threads that run calls, by index of the call."""
        self._abandoned = False

    def run(self, place: int) -> bool:
        """Make one call. Returns whether the caller had stopped waiting when it ended."""
        with self._lock:
            if self._abandoned:
                return False
            self._waiting -= 1
            self._running[place] = get_native_id()
        try:
            self._results[place] = self._calls[place]()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._results[place] = error
        with self._lock:
            del self._running[place]
            self._settle()
            return self._abandoned

    def abandon(self) -> list[int]:
        """Begin no further call; return the threads that are in one."""
        with self._lock:
            self._abandoned = True
            self._waiting = 0
            self._settle()
            return list(self._running.values())

    def results(self) -> list[T]:
        for result in self._results:
            if isinstance(result, BaseException):
                raise result
        return self._results  # type: ignore[return-value]  # every place is filled by now

    def _settle(self) -> None:
        if not self._waiting and not self._running:
            self.quiet.set()
