"""A server and its clients on the GPU machine: rates, first waves, mixed load."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwater.bench._gpu_engine import make_model, release_memory
from headwater.bench._gpu_load import LoadSpec, run_load
from headwater.bench._server_processes import RunningServer, await_ready, stop_server
from headwater.clock import SystemClock
from headwater.device import builtin
from headwater.errors import EngineDead
from headwater.testing.ports import free_port

_MEMORY = Path("/dev/shm")

KINDS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "temperature_top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_repetition": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
    "logprobs_5": {"logprobs": 5},
}


@contextmanager
def model_folder(shape: str) -> Iterator[Path]:
    """A folder with random weights of `shape`, on a file system in memory if there is one."""
    parent = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=parent) as name:
        folder = Path(name)
        model = make_model(shape)
        module: Any = model.module
        weights = {key: value.cpu() for key, value in module.state_dict().items()}
        if module.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        module.config.architectures = [type(module).__name__]
        module.config.dtype = torch.bfloat16
        module.config.save_pretrained(folder)
        for file in builtin.ensure().iterdir():
            if file.name.startswith("tokenizer"):
                shutil.copy(file, folder)
        del module, model, weights
        release_memory()
        yield folder


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[RunningServer, float]]:
    """`headwater serve` on the GPU when it is ready, and the seconds until then."""
    port, clock = free_port(), SystemClock()
    command = [sys.executable, "-m", "headwater", "serve", str(folder), "--device", "cuda"]
    command += ["--port", str(port), "--served-model-name", "bench", *flags]
    began_s = clock.now()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            if not await_ready(process, port):
                log.seek(0)
                tail = log.read().decode(errors="replace")[-2000:]
                raise EngineDead(f"headwater did not start:\n{tail}")
            ready_s = clock.now() - began_s
            yield (
                RunningServer(
                    engine="headwater", port=port, compute_pid=process.pid, group=process.pid
                ),
                ready_s,
            )
        finally:
            stop_server(process)


def measure_http(folder: Path, clients: tuple[int, ...]) -> dict[str, Any]:
    """A server with default settings: its first waves, then streaming completions with 200
    prompt tokens, of which 192 are shared, and 128 output tokens."""
    found: dict[str, Any] = {}
    with serving(folder) as (server, ready_s):
        found["ready_s"] = ready_s
        found["waves"] = _waves(server)
        _load(server, clients=64, requests=128, seed=1)
        for count in clients:
            found[f"greedy_{count}"] = _load(
                server, clients=count, requests=max(2 * count, 512), seed=10 + count
            )
        for name, params in list(KINDS.items())[1:]:
            found[f"{name}_{clients[0]}"] = _load(
                server, clients=clients[0], requests=4 * clients[0], seed=30, params=params
            )
        found["compilations_after_ready"] = _compilations(server)
    return found


def first_waves(folder: Path, *flags: str) -> dict[str, Any]:
    """The first waves of a server without other load."""
    with serving(folder, *flags) as (server, ready_s):
        return {
            "ready_s": ready_s,
            "waves": _waves(server),
            "compilations_after_ready": _compilations(server),
        }


def compare_waves(with_host: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    """Divide the times of the first wave with a host tier by those without one, and by those of
    the second wave."""
    found = {"with_host": with_host, "without_host": without}
    for which in ("p50", "p99"):
        key = f"first_token_{which}_ms"
        first, second = (wave[key] for wave in with_host["waves"][:2])
        found[f"{which}_over_without_host"] = first / without["waves"][0][key]
        found[f"{which}_over_second_wave"] = first / second
    return found


def _waves(server: RunningServer) -> list[dict[str, float]]:
    """Send 16 prompts of 4,000 tokens with 16 output tokens at once, as the first requests of a
    server, and then 16 other ones."""
    return [
        _load(server, clients=16, requests=16, prompt=4000, output=16, shared=0, seed=seed)
        for seed in (1, 2)
    ]


def measure_mixed(folder: Path, budgets: tuple[int, ...]) -> dict[str, Any]:
    """Compare the adaptive budget of prompt tokens with fixed ones: 128 clients, prompts of
    1,000 tokens with nothing in common, 128 output tokens."""
    found: dict[str, Any] = {}
    settings = {"adaptive": [], **{
        f"fixed_{tokens}": ["--max-itl-ms", "0", "--max-num-batched-tokens", str(tokens)]
        for tokens in budgets
    }}  # fmt: skip
    for name, flags in settings.items():
        seqs = ["--max-num-seqs", "256", "--swap-space", "0"]
        with serving(folder, *seqs, *flags) as (server, ready_s):
            waves = _waves(server)
            found[name] = _load(
                server, clients=128, requests=384, prompt=1000, shared=0, seed=6
            ) | {"ready_s": ready_s, "waves": waves}
    best = max(found[name]["tokens_s"] for name in found if name != "adaptive")
    found["adaptive_of_best_fixed"] = found["adaptive"]["tokens_s"] / best
    return found


def _load(server: RunningServer, **changes: Any) -> dict[str, float]:  # noqa: ANN401
    spec = {"prompt": 200, "output": 128, "shared": 192, **changes}
    return run_load(LoadSpec(port=server.port, **spec)).summary()


def _compilations(server: RunningServer) -> float:
    return server.counters()["headwater:engine_compilations_total"]
