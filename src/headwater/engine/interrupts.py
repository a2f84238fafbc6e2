"""Handles Ctrl-C between two turns of the loop, never inside one.

An interrupt can come between any two instructions. Inside a step it would leave a batch that
was scheduled but never computed. So it is remembered, and raised where no work is half done.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Inside its `with` statement, an interrupt (SIGINT) waits for `check`, for `open`, or for
    the end of the statement.

    It does nothing outside the main thread, because Python delivers signals only there.
    """

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = is_main and callable(self._before)
        self._came = False
        self._is_open = False

    def __enter__(self) -> "Interrupts":
        if self._holds:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._before)
        self.check()

    def check(self) -> None:
        """Raise the interrupt that arrived, if one did."""
        if self._came:
            self._came = False
            self._deliver(None)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside its `with` statement, interrupts take effect at once. The loop sleeps
        there."""
        self._is_open = True
        try:
            self.check()
            yield
        finally:
            self._is_open = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_open:
            self._deliver(frame)
        else:
            self._came = True

    def _deliver(self, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(signal.SIGINT, frame)
