"""Media for benchmarks of storage: a directory, and a redis-server and a mooncake_master that
the benchmark starts."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headwater.testing.ports import await_port, free_port

Media = dict[str, dict[str, Any]]
"""Settings of each backend that this machine can run, by the backend's name."""


@contextmanager
def open_media(folder: Path, *, capacity_bytes: int) -> Iterator[Media]:
    """Start the installed servers; the others are left out."""
    media: Media = {
        "file": {
            "path": str(folder / "blocks"),
            "capacity_bytes": capacity_bytes,
            "reserve_bytes": 0,
        }
    }
    with ExitStack() as stack:
        redis, mooncake = start_redis(folder, stack), start_mooncake(stack)
        if redis is not None:
            media["redis"] = {"url": redis.address}
        if mooncake is not None:
            media["mooncake"] = {"master": mooncake.address, "segment_bytes": capacity_bytes}
        yield media


class StorageServer(NamedTuple):
    """A server that the benchmark started, and where it listens."""

    address: str
    process: subprocess.Popen[bytes]


def start_redis(folder: Path, stack: ExitStack) -> StorageServer | None:
    """A Redis server until `stack` ends; None if it is not installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        return None
    # The backend warns about a server without a memory limit. This server lives too briefly to
    # need one.
    logging.getLogger("headwater.storage.redis").setLevel(logging.ERROR)
    port = free_port()
    flags = f"--bind 127.0.0.1 --port {port} --appendonly no --dir {folder}".split()
    process = stack.enter_context(start_server([program, *flags, "--save", ""], port))
    return StorageServer(f"redis://127.0.0.1:{port}/0", process)


def start_mooncake(stack: ExitStack) -> StorageServer | None:
    """A Mooncake master until `stack` ends; None if it is not installed."""
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        return None
    port = free_port()
    flags = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    flags += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    process = stack.enter_context(start_server([str(program), *flags], port))
    return StorageServer(f"127.0.0.1:{port}", process)


@contextmanager
def start_server(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process and yield it when it listens on `port`; kill it at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            await_port(port, process)
            yield process
        finally:
            process.kill()
