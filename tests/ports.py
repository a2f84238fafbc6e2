"""Ports on loopback for servers that tests start."""

import socket
import subprocess
from threading import Event


def free_port() -> int:
    """A port that nobody listens on, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when something listens; fail if the process ends first."""
    for _ in range(500):
        assert process.poll() is None, f"{process.args!r} ended: {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            Event().wait(0.02)
        else:
            return
    raise AssertionError(f"nothing listens on port {port}")
