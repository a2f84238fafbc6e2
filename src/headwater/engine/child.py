"""Starts the engine process, and notices when it ends.

A plain child program, never a fork: started from the main thread before any other thread
exists. Its standard input is a pipe that this process holds open: the settings go down it
first, and its end tells the child that this process is gone.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from headwater.engine.rundir import RunDir

_STOP_TIMEOUT_S = 10.0

_HUGE_PAGES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 1 << 30,
        "trim_threshold": 1 << 30,
    }.items()
)
"""glibc's allocator in huge pages that it keeps: weights are read from end to end in every
step, a tenth faster so, and a prompt's activations take no page faults. glibc reads this
before the program begins; others ignore it."""


class EngineChild:
    """Owns one engine process and the folder its socket is in."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        """Run `python -m <command> ADDRESS`; `settings`, one line, is what it reads first."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("processes are started from the main thread only")
        self.rundir = RunDir()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command, self.rundir.address],
            stdin=subprocess.PIPE,
            env={"GLIBC_TUNABLES": _HUGE_PAGES, **os.environ},
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which drains first
        )
        assert self._process.stdin is not None, "asked for a pipe"
        self._pipe = self._process.stdin
        self._pipe.write(settings + b"\n")
        self._pipe.flush()

    @property
    def address(self) -> str:
        return self.rundir.address

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call `on_exit(code)` from another thread, once, when the process has ended."""

        def wait() -> None:
            on_exit(self._process.wait())

        threading.Thread(target=wait, name="engine-exit", daemon=True).start()

    def close(self, *, at_once: bool = False, timeout_s: float = _STOP_TIMEOUT_S) -> int:
        """Wait for a process that was told to stop; end it if it does not. Its exit code.

        `at_once` ends one that was never told. Safe to call twice.
        """
        if at_once:
            self._pipe.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._pipe.close()
            self.rundir.close()
