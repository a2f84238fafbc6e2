"""Child processes of the supervisor. They are started as programs, never forked.

Each child has one end of a socket pair as its standard input. Messages are lines of JSON. A
closed socket tells each side that the other process has ended, whatever the cause.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

_HUGE_PAGES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 1 << 30,
        "trim_threshold": 1 << 30,
    }.items()
)
"""With these settings, glibc allocates huge pages and keeps them. Reading all weights, which
every step does, is then a tenth faster, and the activations of a prompt cause no page faults.
glibc reads its settings before the program begins; other C libraries ignore them."""

_PR_SET_CHILD_SUBREAPER = 36
_GROUP_END_S = 10.0
_LOOK_S = 0.01

ENGINE_ENVIRONMENT = {"GLIBC_TUNABLES": _HUGE_PAGES}
"""Environment variables of an engine process, unless the operator set them."""


class ChildProcess:
    """Owns one child process in a session of its own, and this end of its socket."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Run `python -m <command>`; it inherits `pass_fds`. Variables that are set in the
        environment of this process override `environment`."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("processes are started from the main thread only")
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=theirs.fileno(),
                env={**(environment or {}), **os.environ},
                pass_fds=tuple(pass_fds),
                # Ctrl-C in a terminal must reach only the supervisor, which drains first.
                start_new_session=True,
            )
        self._exit: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def wait(self) -> int:
        """Wait for the end of the process and return its exit code; negative for a signal."""
        if self._exit is None:
            self._exit = asyncio.get_running_loop().create_future()
            self._watch(self._exit)
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """Kill the process and all processes that it started, at once."""
        if not self.has_ended:
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self, timeout_s: float) -> int:
        """Wait for a child that was told to stop, kill it after `timeout_s`, and return its
        exit code."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    async def end_group(self) -> None:
        """Kill processes that the child started and left behind, such as other ranks of an
        engine. They may still write to memory that the next engine uses, so this waits for
        their end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GROUP_END_S):
                while self._has_group():  # noqa: ASYNC110 -- only children have descriptors
                    await asyncio.sleep(_LOOK_S)

    def _has_group(self) -> bool:
        """Whether processes of its group are left. Reaps those that have ended."""
        try:
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        return True

    def _watch(self, exited: "asyncio.Future[int]") -> None:
        loop = asyncio.get_running_loop()
        if self.has_ended:
            exited.set_result(self._process.returncode)
            return
        descriptor = os.pidfd_open(self.pid)

        def on_exit() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            exited.set_result(self._process.wait())

        loop.add_reader(descriptor, on_exit)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that this process can wait for
    their end. Does nothing on systems other than Linux."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def describe_exit(code: int) -> str:
    """An exit code in words, for operators."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
