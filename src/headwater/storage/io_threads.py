"""Threads that run calls which may hang, so that their caller can stop waiting.

A call in the kernel or in a C++ library cannot be interrupted. It runs in a lane; when its
deadline passes the caller is told so, with an event that says when the lane is out of it.
"""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import Generic, TypeVar

from headwater.errors import StorageError, StorageTimeout

T = TypeVar("T")


class IoThreads:
    """A fixed number of daemon threads: a hung one never keeps the process from exiting."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._closed = False
        self._idle = Condition()
        self._running = 0

    def run(self, calls: Sequence[Callable[[], T]], *, timeout_s: float) -> list[T]:
        """The results of all calls, in order; the first error if one failed.

        After `timeout_s`, StorageTimeout: calls not begun yet never begin, and `quiet` is set
        when those that had begun have ended.
        """
        if not calls:
            return []
        self._start()
        group = _Group(calls)
        for place in range(len(calls)):
            self._queue.put(lambda place=place: group.run(place))  # type: ignore[misc]
        if not group.quiet.wait(timeout_s):
            group.abandon()
            raise StorageTimeout(
                f"{self._name} did not answer within {timeout_s:g} s", quiet=group.quiet
            )
        return group.results()

    def drain(self, timeout_s: float) -> bool:
        """Wait until no call is running; False if one still is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, timeout_s)

    def close(self) -> None:
        """Let every thread end after what it is doing; waits for none."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise StorageError(f"{self._name} is closed")
            while len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            with self._idle:
                self._running += 1
            call()
            with self._idle:
                self._running -= 1
                self._idle.notify_all()
            del call  # it holds buffers and files, and the next one may be long in coming


class _Group(Generic[T]):
    """The calls of one `run`: which have begun, and what came of them."""

    def __init__(self, calls: Sequence[Callable[[], T]]) -> None:
        self.quiet = Event()
        self._calls = calls
        self._results: list[T | BaseException | None] = [None] * len(calls)
        self._lock = Lock()
        self._waiting = len(calls)
        self._running = 0
        self._abandoned = False

    def run(self, place: int) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._waiting -= 1
            self._running += 1
        try:
            self._results[place] = self._calls[place]()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._results[place] = error
        with self._lock:
            self._running -= 1
            self._settle()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            self._waiting = 0
            self._settle()

    def results(self) -> list[T]:
        for result in self._results:
            if isinstance(result, BaseException):
                raise result
        return self._results  # type: ignore[return-value]  # every place is filled by now

    def _settle(self) -> None:
        if not self._waiting and not self._running:
            self.quiet.set()
