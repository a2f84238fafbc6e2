"""Media for benchmarks of storage: a directory, a redis-server and a mooncake_master of our own."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headwater.testing.ports import await_port, free_port

Media = dict[str, dict[str, Any]]
"""Settings of each backend that this machine can run, by the backend's name."""


@contextmanager
def open_media(folder: Path, *, capacity_bytes: int) -> Iterator[Media]:
    """Start what is installed; what is not is left out."""
    media: Media = {
        "file": {
            "path": str(folder / "blocks"),
            "capacity_bytes": capacity_bytes,
            "reserve_bytes": 0,
        }
    }
    redis = shutil.which("redis-server") or shutil.which("valkey-server")
    mooncake = Path(sys.executable).with_name("mooncake_master")
    with ExitStack() as stack:
        if redis is not None:
            port = free_port()
            flags = f"--bind 127.0.0.1 --port {port} --appendonly no --dir {folder}".split()
            stack.enter_context(_server([redis, *flags, "--save", ""], port))
            media["redis"] = {"url": f"redis://127.0.0.1:{port}/0"}
        if mooncake.exists():
            port = free_port()
            flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
            flags += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
            stack.enter_context(_server([str(mooncake), *flags], port))
            master = f"127.0.0.1:{port}"
            media["mooncake"] = {"master": master, "segment_bytes": capacity_bytes}
        yield media


@contextmanager
def _server(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            await_port(port, process)
            yield
        finally:
            process.kill()
