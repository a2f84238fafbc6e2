"""Stops processes so that they look like hanging ones: alive, connected and silent."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes are stopped inside the block."""
    try:
        for pid in pids:
            stand_still(pid)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def stand_still(pid: int) -> None:
    """Stop a process, and return when it has stopped; sending the signal alone does not wait
    for that."""
    os.kill(pid, signal.SIGSTOP)
    for _ in range(500):
        if all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
            return
        Event().wait(0.01)
    raise AssertionError(f"process {pid} does not stop")


def _is_stopped(thread: Path) -> bool:
    try:
        stat = (thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # it ended in the meantime
    return stat.rpartition(")")[2].split()[0] == "T"
