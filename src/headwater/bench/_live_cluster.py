"""A cluster as `headwater up` starts it, for benchmarks that attack or measure its listeners."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.clock import SystemClock
from headwater.errors import EngineDead
from headwater.launch.parent_watch import VARIABLE

_CHILD = re.compile(r"^  (\S+) +(https?://\S+)  pid (\d+)$", re.M)
_START_S = 240.0
_STOP_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProcess:
    """The router, or one instance."""

    name: str
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCluster:
    """A running cluster."""

    children: Mapping[str, LiveProcess]
    """The router (`router`) and the instances (`mixed-1`, …)."""

    token: str
    """Its peer token."""

    log: Path
    """The file with the output of its processes."""

    @property
    def router(self) -> LiveProcess:
        return self.children["router"]


@contextmanager
def live_cluster(
    flags: Sequence[str], *, wrapper: Sequence[str] = (), variables: Mapping[str, str] = {}
) -> Iterator[LiveCluster]:
    """`headwater up` with `flags` on free ports, until the end of the `with` statement.
    `wrapper` is put in front of the command, for limits of the operating system."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        log = Path(folder) / "log"
        # Nothing is written to this pipe. When this process is killed, its end is closed, and
        # the cluster ends.
        lifeline, held = os.pipe()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "headwater", "up", "--port", "0", *flags],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"HEADWATER_PEER_TOKEN": token, VARIABLE: str(lifeline), **variables},
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        try:
            yield LiveCluster(children=_wait_ready(process, log), token=token, log=log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(lifeline)
            os.close(held)


def processes_of(pid: int) -> list[int]:
    """A process and everything it started; empty when it has ended."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        try:
            children = [
                path.read_text() for path in Path(f"/proc/{one}/task").glob("*/children")
            ]
            if Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
        except OSError:
            continue
        found.append(one)
        todo += [int(word) for text in children for word in text.split()]
    return found


def socket_inodes(pid: int) -> list[str]:
    """The inodes of the sockets that a process has open."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(path.readlink()))
        except OSError:
            continue
    return [link[8:-1] for link in links if link.startswith("socket:")]


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> dict[str, LiveProcess]:
    clock, pause = SystemClock(), threading.Event()
    deadline_s = clock.now() + _START_S
    while "stop with Ctrl-C" not in (text := log.read_text(errors="replace")):
        if process.poll() is not None or clock.now() > deadline_s:
            raise EngineDead(f"the cluster did not start:\n{text[-2000:]}")
        pause.wait(_POLL_S)
    return {
        name: LiveProcess(name=name, url=url, pid=int(pid))
        for name, url, pid in _CHILD.findall(text)
    }
