"""Ports on loopback for servers that tests and benchmarks start."""

import socket
import subprocess
from threading import Event

_TRIES = 1500
_PAUSE_S = 0.02
"""Pause between two tries; all tries together take the 30 seconds that a server may take to
start.
"""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_listening(port: int) -> bool:
    """Whether a process accepts connections on `port` of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when a process listens on `port`. Raises RuntimeError if `process` ends first, and
    TimeoutError after 30 seconds."""
    for _ in range(_TRIES):
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode}")
        if _is_listening(port):
            return
        Event().wait(_PAUSE_S)
    raise TimeoutError(f"no process listens on port {port} after 30 s")
