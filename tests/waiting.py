"""Waiting for a state that another process or thread reaches."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

T = TypeVar("T")


def until(reached: Callable[[], T], *, within_s: float = 30.0, pause_s: float = 0.01) -> T:
    """Call `reached` until its result is true, and return that; fails after `within_s`."""
    end_s, pause = time.monotonic() + within_s, Event()
    while not (result := reached()):
        assert time.monotonic() < end_s, f"not reached within {within_s:g} s: last {result!r}"
        pause.wait(pause_s)
    return result


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; nothing may have asked for its exit code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
