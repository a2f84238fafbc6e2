"""Keys pressed in a terminal, read without waiting for Enter."""

import os
import select
import sys
import termios
import tty
from threading import Event
from types import TracebackType
from typing import Self


class PressedKeys:
    """Inside its `with` statement, a terminal on standard input delivers each key at once.
    Without a terminal, `wait` only waits."""

    def __init__(self) -> None:
        self._pause = Event().wait
        self._file = (
            sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        )

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """The key pressed within `seconds`; empty if none was."""
        if self._file is None:
            self._pause(seconds)
            return ""
        ready, _, _ = select.select([self._file], [], [], seconds)
        return os.read(self._file, 16).decode(errors="replace") if ready else ""
