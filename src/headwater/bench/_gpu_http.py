"""A server and its clients on the GPU machine: rates, first waves, mixed load.

On a CPU the same code runs with few and short requests, as a test of the benchmark itself.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.bench._gpu_load import LoadResult, LoadSpec, run_load
from headwater.bench._server_processes import RunningServer, await_ready, stop_server
from headwater.clock import SystemClock
from headwater.errors import EngineDead
from headwater.testing.ports import free_port

KINDS: Mapping[str, dict[str, Any]] = {
    "temperature_top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_repetition": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
    "logprobs_5": {"logprobs": 5},
}
_HOST_GIB = 48
"""Host tier of the first waves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model of the servers, and the size of their load."""

    folder: Path
    device: str
    clients: tuple[int, ...]
    chat: Mapping[str, int]
    """Requests that share most of their prompt."""

    together_output: int
    """Output tokens of requests that all decode at the same time."""

    wave: Mapping[str, int]
    """The requests of a wave, which arrive at once."""

    mixed: Mapping[str, int]
    """Requests with long prompts that share nothing."""


def served_model(folder: Path, device: str, *, is_quick: bool) -> ServedModel:
    """A model with its loads: the documented ones on a GPU, small ones on a CPU."""
    if device == "cpu":
        return ServedModel(
            folder=folder,
            device=device,
            clients=(4,),
            chat={"prompt": 40, "output": 8, "shared": 32},
            together_output=48,
            wave={"clients": 4, "requests": 4, "prompt": 100, "output": 4},
            mixed={"clients": 4, "requests": 8, "prompt": 100, "output": 8},
        )
    return ServedModel(
        folder=folder,
        device=device,
        clients=(32,) if is_quick else (128, 512, 1024),
        chat={"prompt": 200, "output": 128, "shared": 192},
        together_output=384,
        wave={"clients": 16, "requests": 16, "prompt": 4000, "output": 16},
        mixed={"clients": 128, "requests": 384, "prompt": 1000, "output": 128},
    )


@contextmanager
def serving(
    served: ServedModel, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[RunningServer, float]]:
    """Start `headwater serve`; yield the server when it is ready, and the seconds until
    then."""
    port, clock = free_port(), SystemClock()
    command = [sys.executable, "-m", "headwater", "serve", str(served.folder)]
    command += ["--device", served.device]
    command += ["--port", str(port), "--served-model-name", "bench", *flags]
    began_s = clock.now()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})}, start_new_session=True,
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


def measure_http(served: ServedModel, found: dict[str, Any]) -> None:
    """Measure a server with default settings: its first waves, then streaming completions with
    200 prompt tokens, of which 192 are shared, and 128 output tokens. `together_N` are N
    requests that all decode at the same time."""
    with serving(served) as (server, ready_s):
        found["ready_s"] = ready_s
        found["waves"] = _waves(server, served)
        least, chat = served.clients[0], served.chat
        _load(server, clients=least, requests=least, seed=1, **chat)
        for count in served.clients:
            found[f"greedy_{count}"] = _load(
                server,
                clients=count,
                requests=max(2 * count, 4 * least),
                seed=10 + count,
                **chat,
            )
            together = {**chat, "output": served.together_output}
            found[f"together_{count}"] = _send(
                server, clients=count, requests=count, seed=20 + count, **together
            ).summary_together()
        for name, params in KINDS.items():
            found[f"{name}_{least}"] = _load(
                server, clients=least, requests=4 * least, seed=30, params=params, **chat
            )
        found["compilations_after_ready"] = _compilations(server)


def measure_first_waves(served: ServedModel, found: dict[str, Any]) -> None:
    """Measure the first requests of three servers: with a host tier on a machine that has
    compiled no kernel, with the same host tier and those kernels, and without a host tier."""
    with tempfile.TemporaryDirectory() as cache:
        # Both names, because the second one takes precedence if it is set outside.
        kept = {"HEADWATER_CACHE": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        host = ("--swap-space", str(_HOST_GIB if served.device == "cuda" else 1))
        for name, flags in (
            ("new_machine", host),
            ("with_host", host),
            ("without_host", ("--swap-space", "0")),
        ):
            with serving(served, *flags, environment=kept) as (server, ready_s):
                found[name] = {
                    "ready_s": ready_s,
                    "waves": _waves(server, served),
                    "compilations_after_ready": _compilations(server),
                }
    found |= compare_waves(found)


def compare_waves(found: Mapping[str, Any]) -> dict[str, float]:
    """Divide the times of the first wave with a host tier by those without one, and by those of
    the second wave; the latter also on a new machine."""
    ratios: dict[str, float] = {}
    without = found["without_host"]["waves"][0]
    for which in ("p50", "p99"):
        key = f"first_token_{which}_ms"
        for prefix, name in (("", "with_host"), ("new_machine_", "new_machine")):
            first, second = (wave[key] for wave in found[name]["waves"][:2])
            ratios[f"{prefix}{which}_over_without_host"] = first / without[key]
            ratios[f"{prefix}{which}_over_second_wave"] = first / second
    return ratios


def measure_mixed(served: ServedModel, budgets: tuple[int, ...], found: dict[str, Any]) -> None:
    """Compare the adaptive budget of prompt tokens with fixed ones: 128 clients, prompts of
    1,000 tokens with nothing in common, 128 output tokens."""
    settings = {"adaptive": [], **{
        f"fixed_{tokens}": ["--max-itl-ms", "0", "--max-num-batched-tokens", str(tokens)]
        for tokens in budgets
    }}  # fmt: skip
    for name, flags in settings.items():
        seqs = ["--max-num-seqs", "256", "--swap-space", "0"]
        with serving(served, *seqs, *flags) as (server, ready_s):
            _waves(server, served)
            load = _load(server, seed=6, **served.mixed)
            found[name] = load | {"ready_s": ready_s}
    best = max(found[name]["tokens_s"] for name in settings if name != "adaptive")
    found["adaptive_of_best_fixed"] = found["adaptive"]["tokens_s"] / best


def _waves(server: RunningServer, served: ServedModel) -> list[dict[str, float]]:
    """Send a wave at once, as the first requests of a server, and then another one."""
    return [_load(server, seed=seed, **served.wave) for seed in (1, 2)]


def _load(server: RunningServer, **load: Any) -> dict[str, float]:  # noqa: ANN401
    return _send(server, **load).summary()


def _send(server: RunningServer, **load: Any) -> LoadResult:  # noqa: ANN401 -- see LoadSpec
    return run_load(LoadSpec(port=server.port, **load))


def _compilations(server: RunningServer) -> float | None:
    """Kernels compiled or loaded after the server was ready; None where nothing is compiled."""
    return server.counters().get("headwater:engine_compilations_total")
