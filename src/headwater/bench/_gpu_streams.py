"""Many sequences in one process: the ceiling for a server over HTTP."""

from typing import Any

import numpy as np

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine, weight_bytes
from headwater.device.model import LoadedModel
from headwater.types import RequestId

PROMPT, SHARED, OUTPUT = 200, 192, 128
_REQUESTS_EACH = 2
_SKIPPED = 4


def blocks_for(clients: int) -> int:
    """Device blocks for this many clients, and as many for cached blocks of ended requests."""
    each = -(-(PROMPT + OUTPUT) // BLOCK_TOKENS) + 1
    return clients * each * 2 + 64


def measure_streams(
    model: LoadedModel, engine: GpuEngine, clients: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """Steps while all decode, as a share of the roofline; and a closed loop of `clients`."""
    engine.runner.warm(clients)
    served = engine.serve(_prompts(engine, clients, seed=clients), max_tokens=OUTPUT)
    steps = np.array(served.steps_s[_SKIPPED:])
    context = PROMPT + OUTPUT // 2
    roofline_ms = _roofline_ms(model, clients, context, ceilings)
    return {
        "step_ms": float(steps.mean()) * 1e3,
        "step_p99_ms": float(np.percentile(steps, 99)) * 1e3,
        "roofline_ms": roofline_ms,
        "share": roofline_ms / (float(steps.mean()) * 1e3),
        "closed_loop_tokens_s": _closed_loop(engine, clients),
    }


def _roofline_ms(
    model: LoadedModel, rows: int, context: int, ceilings: dict[str, float]
) -> float:
    """The time to read the KV, plus the longer of the times to read and to multiply the
    weights."""
    read = weight_bytes(model)
    weights_ms = read / ceilings["memory_gb_s"] / 1e6
    flops_ms = 2 * (read / model.dtype.itemsize) * rows / ceilings["product_tflop_s"] / 1e9
    kv_ms = rows * context * model.token_bytes / ceilings["memory_gb_s"] / 1e6
    return max(weights_ms, flops_ms) + kv_ms


def _closed_loop(engine: GpuEngine, clients: int) -> float:
    """Tokens per second, from the first request to the last token."""
    prompts = _prompts(engine, clients * _REQUESTS_EACH, seed=clients + 1)
    alive, tokens, clock = set[RequestId](), 0, engine.clock
    began_s = clock.now()
    while prompts or alive:
        while prompts and len(alive) < clients:
            alive.add(engine.add(prompts.pop(), OUTPUT))
        engine.core.wait()
        for output in engine.core.step():
            tokens += len(output.tokens)
            if output.finish_reason is not None:
                alive.discard(output.request_id)
    return tokens / (clock.now() - began_s)


def _prompts(engine: GpuEngine, count: int, *, seed: int) -> list[Any]:
    common = engine.prompt(SHARED, seed=7)
    return [
        np.concatenate((common, engine.prompt(PROMPT - SHARED, seed * 100_000 + row)))
        for row in range(count)
    ]
