"""`headwater doctor`: what this machine has, what is missing or slow, and how to fix it.

Nothing is started, and no heavy library is imported: versions are read from package metadata.
"""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from headwater import __version__
from headwater.native.folder import cache_folder

_PORTS = {8000: "headwater serve", 8100: "headwater route"}
_GIB = 1 << 30
_LEAST_FILES = 4096
_COMMAND_TIMEOUT_S = 10.0

_PACKAGES = (
    ("torch", "engine", True, "headwater serve and LLM"),
    ("transformers", "engine", True, "headwater serve and LLM"),
    ("tokenizers", "engine", True, "headwater serve and LLM"),
    ("msgspec", "server", True, "headwater serve and route"),
    ("pyzmq", "server", True, "headwater serve and route"),
    ("starlette", "server", True, "headwater serve and route"),
    ("uvicorn", "server", True, "headwater serve and route"),
    ("triton", "gpu", False, "a GPU"),
    ("matplotlib", "plots", False, "pictures of replay and plan"),
    ("mooncake-transfer-engine-non-cuda", "mooncake", False, "Mooncake storage and link"),
    ("opentelemetry-sdk", "otel", False, "traces"),
)

Verdict = Literal["ok", "note", "slow", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """One finding about the machine."""

    verdict: Verdict
    """`missing`: a command cannot run. `slow`: it runs slower than it could. `note`: only an
    optional feature is absent."""

    what: str
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n{'':10}{'':14}fix: {self.fix}" if self.fix else ""
        return f"{self.verdict:10}{self.what:14}{self.detail}{fix}"


def run_doctor() -> int:
    """Print the findings. Returns 1 if the server cannot run, otherwise 0."""
    findings = [finding for look in _LOOKS for finding in look()]
    sys.stdout.write("".join(f"{finding}\n" for finding in findings))
    missing = sum(finding.verdict == "missing" for finding in findings)
    slow = sum(finding.verdict == "slow" for finding in findings)
    ready = "headwater serve can run" if not missing else "headwater serve cannot run yet"
    sys.stdout.write(f"\n{ready}: {missing} missing, {slow} slow\n")
    return 1 if missing else 0


def look_at_versions() -> Iterable[DoctorFinding]:
    yield DoctorFinding(verdict="ok", what="headwater", detail=__version__)
    yield DoctorFinding(
        verdict="ok", what="python", detail=f"{platform.python_version()} ({sys.executable})"
    )
    for name, extra, is_needed, use in _PACKAGES:
        try:
            yield DoctorFinding(verdict="ok", what="package", detail=f"{name} {version(name)}")
        except PackageNotFoundError:
            yield DoctorFinding(
                verdict="missing" if is_needed else "note",
                what="package",
                detail=f"{name} is not installed; needed for {use}",
                fix=f"pip install 'headwater[{extra}]'",
            )


def look_at_compiler() -> Iterable[DoctorFinding]:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        yield DoctorFinding(verdict="ok", what="compiler", detail=compiler)
        return
    yield DoctorFinding(
        verdict="slow",
        what="compiler",
        detail="no C compiler: block keys are hashed in Python, small CPU operations run in torch",
        fix="apt-get install gcc libc6-dev, or set CC",
    )


def look_at_memory() -> Iterable[DoctorFinding]:
    cores = len(os.sched_getaffinity(0))
    yield DoctorFinding(verdict="ok", what="cpu", detail=f"{cores} cores, {platform.machine()}")
    available = _memory_bytes("MemAvailable")
    yield DoctorFinding(
        verdict="ok" if available >= 2 * _GIB else "slow",
        what="memory",
        detail=f"{available / _GIB:.1f} of {_memory_bytes('MemTotal') / _GIB:.1f} GiB available",
        fix="" if available >= 2 * _GIB else "free memory, or lower --gpu-memory-utilization",
    )
    shared = shutil.disk_usage("/dev/shm").free
    yield DoctorFinding(
        verdict="ok" if shared >= _GIB else "note",
        what="/dev/shm",
        detail=f"{shared / _GIB:.1f} GiB free",
        fix=""
        if shared >= _GIB
        else "the shm link between instances needs it: docker --shm-size",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield DoctorFinding(
        verdict="ok" if files >= _LEAST_FILES else "note",
        what="open files",
        detail=f"limit {files:,}",
        fix=""
        if files >= _LEAST_FILES
        else f"ulimit -n {_LEAST_FILES}: each connection takes one file descriptor",
    )


def look_at_device() -> Iterable[DoctorFinding]:
    command = shutil.which("nvidia-smi")
    if command is None:
        yield DoctorFinding(
            verdict="note", what="gpu", detail="none found; --device cpu is the default"
        )
        return
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            query, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        yield DoctorFinding(
            verdict="note",
            what="gpu",
            detail=f"nvidia-smi fails: {exc}",
            fix="check the driver",
        )
        return
    for line in found.stdout.splitlines():
        yield DoctorFinding(
            verdict="ok", what="gpu", detail=f"{line}; serve with --device cuda"
        )


def look_at_ports() -> Iterable[DoctorFinding]:
    for port, command in _PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as exc:
                yield DoctorFinding(
                    verdict="note",
                    what="port",
                    detail=f"{port} of {command} cannot be bound: {exc.strerror}",
                    fix="choose another with --port, or stop what uses it",
                )
            else:
                yield DoctorFinding(
                    verdict="ok", what="port", detail=f"{port} is free ({command})"
                )


def look_at_storage() -> Iterable[DoctorFinding]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    is_fine = free >= _GIB and os.access(existing, os.W_OK)
    yield DoctorFinding(
        verdict="ok" if is_fine else "slow",
        what="storage",
        detail=f"{folder} (built-in model, compiled code): {free / _GIB:.1f} GiB free",
        fix="" if is_fine else "free space there, or set XDG_CACHE_HOME to a writable folder",
    )
    for name, purpose in (("redis-server", "redis"), ("mooncake_master", "mooncake")):
        if (path := shutil.which(name)) is not None:
            yield DoctorFinding(
                verdict="ok",
                what="storage",
                detail=f"{path}; --kvcache-storage-backend {purpose}",
            )


_LOOKS: tuple[Callable[[], Iterable[DoctorFinding]], ...] = (
    look_at_versions,
    look_at_compiler,
    look_at_memory,
    look_at_device,
    look_at_ports,
    look_at_storage,
)


def _memory_bytes(field: str) -> int:
    """A field of /proc/meminfo in bytes; 0 if it cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith(field + ":")), "x 0")
    return int(found.split()[1]) * 1024
