"""Where processes of a cluster run: the interface, and its implementation for this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from headwater.cluster.processes import ProcessSpec
from headwater.launch.parent_watch import VARIABLE

_READY = re.compile(r"is ready at (https?://\S+)")
_COMPLAINTS = (" WARNING ", " ERROR ", "error:")
_MAX_LOG_BYTES = 64 << 20


class ProcessEvent(NamedTuple):
    """What happened to a process. The last event of a process has `is_exit`."""

    name: str
    run: int
    """Number of the start, from 1."""

    url: str = ""
    """The process is ready at this URL."""

    line: str = ""
    """A warning or an error that it logged."""

    waits: str | None = None
    """Why it has no place yet; empty when it has one again."""

    is_exit: bool = False
    exit_text: str = ""
    """How it ended, as a text for operators."""


Tell = Callable[[ProcessEvent], None]
"""Receives events. Any thread may call it."""


class RunningProcess(Protocol):
    """A process that was started."""

    place: str
    """Process id and node, as a text for operators."""

    def stop(self) -> None:
        """Ask the process to finish its requests and end. Returns at once."""

    def kill(self) -> None:
        """Kill the process. Returns at once."""


class ProcessHost(Protocol):
    """Starts processes."""

    assigns_gpus: bool
    """Whether the host chooses the GPUs of a process itself."""

    def start(self, process: ProcessSpec, run: int, tell: Tell) -> RunningProcess:
        """Start `process` for the `run`-th time. Returns at once; `tell` receives its
        events."""

    def release(self, name: str) -> None:
        """The process has ended and is not started again for now: give back what is reserved for
        it. Returns at once."""

    def close(self) -> None:
        """Release resources. All processes have ended or were killed."""


class LogFile:
    """The log of one process, in one file and at most one older file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = path.open("a", encoding="utf-8", errors="replace")
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        """Append a line. A file that is too long is renamed first."""
        with self._lock:
            if self._file.tell() > _MAX_LOG_BYTES:
                self._file.close()
                self._path.replace(self._path.with_suffix(".log.1"))
                self._file = self._path.open("a", encoding="utf-8", errors="replace")
            self._file.write(line)
            self._file.flush()


def read_events(name: str, run: int, line: str) -> ProcessEvent | None:
    """The event in a line of a process's output, if there is one."""
    if found := _READY.search(line):
        return ProcessEvent(name, run, url=found.group(1))
    if any(word in line for word in _COMPLAINTS):
        return ProcessEvent(name, run, line=line.rstrip())
    return None


def exit_text(code: int) -> str:
    """`exit code 1` or `signal 9`."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class LocalProcess:
    """A child of this process."""

    def __init__(
        self, process: ProcessSpec, run: int, tell: Tell, *, lifeline: int, log: LogFile
    ) -> None:
        self._name, self._run, self._tell, self._log = process.name, run, tell, log
        self._child = subprocess.Popen(
            [sys.executable, "-m", "headwater", *process.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {VARIABLE: str(lifeline)} | dict(process.environment),
            pass_fds=(lifeline,),
            start_new_session=True,  # Ctrl-C in a terminal reaches only the supervisor
        )
        self.place = f"pid {self._child.pid}"
        threading.Thread(target=self._read, name=process.name, daemon=True).start()

    def stop(self) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._child.stdout is not None, "a pipe was requested"
        with self._child.stdout as lines:
            for line in lines:
                self._log.write(line)
                event = read_events(self._name, self._run, line)
                if event is not None:
                    self._tell(event)
        text = exit_text(self._child.wait())
        self._tell(ProcessEvent(self._name, self._run, is_exit=True, exit_text=text))


class LocalHost:
    """This machine. When this process dies, even from SIGKILL, its children end too."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.assigns_gpus = False
        # This process never writes to the pipe. When this process dies, its end is closed, and
        # the children notice.
        self._lifeline, self._held = os.pipe()

    def start(self, process: ProcessSpec, run: int, tell: Tell) -> RunningProcess:
        log = LogFile(self._logs / f"{process.name}.log")
        return LocalProcess(process, run, tell, lifeline=self._lifeline, log=log)

    def release(self, name: str) -> None:
        """Nothing is reserved on this machine."""

    def close(self) -> None:
        os.close(self._held)
        os.close(self._lifeline)
