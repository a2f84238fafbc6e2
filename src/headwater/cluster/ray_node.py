"""Runs in a Ray actor, on the node of an instance: `headwater serve` as a child, and its output.

The child watches a pipe of the actor, so the child ends with the actor.
"""

import importlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from headwater.launch.parent_watch import VARIABLE

_MAX_LINES = 10_000


class NodeProcess:
    """Runs in the actor, on its node: one `headwater` process and its output."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        address = importlib.import_module("ray").util.get_node_ip_address()
        words = [*arguments, *_listen_words(arguments, address)]
        lifeline, self._held = os.pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "headwater", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | dict(environment) | {VARIABLE: str(lifeline)},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        os.close(lifeline)
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def place(self) -> str:
        """Process id and node."""
        return f"pid {self._child.pid} on {socket.gethostname()}"

    def poll(self) -> tuple[list[str], int | None]:
        """Lines since the last call, and the exit code when the process has ended and
        everything was read."""
        code = self._child.poll()
        if code is not None:
            self._reader.join(5.0)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines, code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def _read(self) -> None:
        assert self._child.stdout is not None, "a pipe was requested"
        with self._child.stdout as lines:
            for line in lines:
                self._lines.append(line)


def _listen_words(arguments: Sequence[str], address: str) -> list[str]:
    """Flags that make an instance listen where other nodes can reach it, unless the cluster
    file has an address."""
    flags = {"--host": address, "--peer-host": address, "--link-host": address}
    if "--splitwise-role" not in arguments:
        del flags["--peer-host"], flags["--link-host"]
    return [word for flag, at in flags.items() if flag not in arguments for word in (flag, at)]
