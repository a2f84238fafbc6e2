"""Progress of long work: a bar on a terminal, a line from time to time elsewhere."""

import sys
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol, TextIO

_NUM_LINES = 10


class Progress(AbstractContextManager["Progress"], Protocol):
    """Receives reports of finished work."""

    def advance(self, done: int = 1) -> None: ...


def show_progress(what: str, total: int, *, out: TextIO | None = None) -> Progress:
    """A bar if `out` (standard error) is a terminal; otherwise lines."""
    out = out or sys.stderr
    return BarProgress(what, total, out) if out.isatty() else LineProgress(what, total, out)


class SilentProgress:
    """Prints nothing."""

    def __enter__(self) -> "SilentProgress":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def advance(self, done: int = 1) -> None:
        return None


class LineProgress(SilentProgress):
    """Prints at most ten lines; the last one when all is done."""

    def __init__(self, what: str, total: int, out: TextIO) -> None:
        self._what = what
        self._total = total
        self._out = out
        self._done = 0
        self._num_lines = 0

    def advance(self, done: int = 1) -> None:
        """Write a line each time another tenth is done."""
        self._done += done
        reached = self._done * _NUM_LINES // max(1, self._total)
        if reached > self._num_lines:
            self._num_lines = reached
            self._out.write(f"{self._what}: {self._done} of {self._total}\n")
            self._out.flush()


class BarProgress:
    """A bar with the remaining time."""

    def __init__(self, what: str, total: int, out: TextIO) -> None:
        # Imported here: rich is slow to import and only terminals need it.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(file=out),
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total)
        self._stack = ExitStack()

    def __enter__(self) -> "BarProgress":
        self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def advance(self, done: int = 1) -> None:
        """Move the bar."""
        self._bar.advance(self._task, done)
