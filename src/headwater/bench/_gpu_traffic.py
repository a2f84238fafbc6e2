"""Traffic with and without the host tier: prompts that never repeat, and a conversation
trace."""

from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.device.model import LoadedModel
from headwater.replay.trace import TraceRequest, read_trace
from headwater.types import RequestId, Tokens

_PROMPT, _OUTPUT, _REQUESTS = 2048, 64, 48


def measure_all_miss(model: LoadedModel, *, pairs: int) -> dict[str, Any]:
    """Throughput with the host tier divided by throughput without it, pair by pair."""
    blocks = _REQUESTS * (_PROMPT + _OUTPUT + BLOCK_TOKENS) // BLOCK_TOKENS
    engines = [
        GpuEngine(
            model,
            num_blocks=blocks + 64,
            host_blocks=host,
            max_num_seqs=_REQUESTS,
            max_batched_tokens=8192,
            write_policy="write_through",
        )
        for host in (0, blocks * 2)
    ]
    for engine in engines:
        engine.runner.warm()
        engine.await_pinned()
        _miss(engine, seed=0)
    losses = []
    for pair in range(pairs):
        order = engines if pair % 2 else engines[::-1]
        seconds = {id(engine): _miss(engine, seed=1 + pair) for engine in order}
        losses.append(1 - seconds[id(engines[0])] / seconds[id(engines[1])])
    written = engines[1].core.stats().links["device_to_host"].num_blocks
    for engine in engines:
        engine.close()
    error = float(np.std(losses, ddof=1)) / np.sqrt(len(losses))
    return {
        "loss": float(np.mean(losses)),
        "loss_low": float(np.mean(losses)) - 1.96 * error,
        "loss_high": float(np.mean(losses)) + 1.96 * error,
        "pairs": pairs,
        "written_gb": written * model.token_bytes * BLOCK_TOKENS / 1e9,
    }


def _miss(engine: GpuEngine, *, seed: int) -> float:
    prompts = [engine.prompt(_PROMPT, seed * 10_000 + row + 1) for row in range(_REQUESTS)]
    return engine.serve(prompts, max_tokens=_OUTPUT).seconds


def measure_trace(
    model: LoadedModel, path: Path, *, requests: int, scale: int, clients: int, blocks: int
) -> dict[str, Any]:
    """Serve the first requests of a trace, whose lengths are divided by `scale`, from this many
    clients. `blocks` is the size of the device tier, which cannot hold all prompts."""
    trace = read_trace(path, requests)
    result: dict[str, Any] = {"requests": requests, "scale": scale, "clients": clients}
    for name, host in (("without_host", 0), ("with_host", 4 * blocks)):
        engine = GpuEngine(
            model,
            num_blocks=blocks,
            host_blocks=host,
            max_num_seqs=clients,
            max_batched_tokens=8192,
            write_policy="write_through",
        )
        engine.runner.warm()
        engine.await_pinned()
        result[name] = _replay(engine, trace, scale, clients)
        engine.close()
    return result


def _replay(
    engine: GpuEngine, trace: list[TraceRequest], scale: int, clients: int
) -> dict[str, Any]:
    waiting, arrived = list(reversed(trace)), dict[RequestId, float]()
    first_s: list[float] = []
    found = dict.fromkeys(("device", "host", "storage"), 0)
    output_tokens = prompt_tokens = running = 0
    began_s = engine.clock.now()
    while waiting or running:
        while waiting and running < clients:
            request = waiting.pop()
            name = engine.add(_scaled(request, scale), max(request.output_length // scale, 1))
            arrived[name] = engine.clock.now()
            running += 1
        engine.core.wait()
        for output in engine.core.step():
            output_tokens += len(output.tokens)
            running -= output.finish_reason is not None
            if output.usage is not None:
                first_s.append(engine.clock.now() - arrived[output.request_id])
                prompt_tokens += output.usage.prompt_tokens
                for tier in found:
                    found[tier] += output.usage.by_tier[tier]
    seconds = engine.clock.now() - began_s
    return {
        "output_tokens_s": output_tokens / seconds,
        "prompt_tokens_s": prompt_tokens / seconds,
        "first_token_p50_ms": float(np.percentile(first_s, 50)) * 1e3,
        "first_token_p99_ms": float(np.percentile(first_s, 99)) * 1e3,
        "device_hits": found["device"] / prompt_tokens,
        "host_hits": found["host"] / prompt_tokens,
        "preemptions": engine.core.stats().num_preemptions,
    }


def _scaled(request: TraceRequest, scale: int) -> Tokens:
    """The prompt, with each block of the trace shortened in the same way, so that prefixes stay
    shared."""
    whole = request.whole_blocks() % 120_000
    kept = whole.reshape(-1, 512)[:, : 512 // scale].ravel()
    return np.ascontiguousarray(kept[: max(request.input_length // scale, 1)], dtype=np.int32)
