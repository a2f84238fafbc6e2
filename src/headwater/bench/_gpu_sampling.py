"""Decode steps of requests with sampling, compared with greedy ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine

PROMPT, OUTPUT = 200, 64
_SKIPPED = 8
_ROUNDS = 3

KINDS: dict[str, dict[str, Any]] = {
    "temperature_top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k_repetition": {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "seed": {"temperature": 1.0, "seed": 7},
    "top_k_top_p": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "logprobs_5": {"logprobs": 5},
}


def blocks_for(batch: int) -> int:
    """Device blocks for this many requests."""
    return batch * (-(-(PROMPT + OUTPUT) // BLOCK_TOKENS) + 1) + 64


def measure_sampling(engine: GpuEngine, batch: int) -> dict[str, Any]:
    """Median step of each kind, and the ratio to greedy, in alternating rounds."""
    engine.runner.warm(batch)
    prompts = [engine.prompt(PROMPT, seed=batch * 1_000 + row) for row in range(batch)]
    engine.serve(prompts, max_tokens=8)
    one_of_each = [*KINDS.values(), *({} for _ in range(max(batch - len(KINDS), 0)))]
    asked: dict[str, Sequence[Mapping[str, Any]]] = {
        "greedy": (),
        **{name: [kind] for name, kind in KINDS.items()},
        "one_row_of_each": one_of_each,
    }
    rounds = [
        {name: _step_ms(engine, prompts, kind) for name, kind in asked.items()}
        for _ in range(_ROUNDS)
    ]
    steps = {name: float(np.median([each[name] for each in rounds])) for name in asked}
    return {
        name: {"step_ms": step_ms, "of_greedy": steps["greedy"] / step_ms}
        for name, step_ms in steps.items()
    }


def _step_ms(
    engine: GpuEngine, prompts: list[Any], sampling: Sequence[Mapping[str, Any]] = ()
) -> float:
    served = engine.serve(prompts, max_tokens=OUTPUT, sampling=sampling)
    return float(np.median(served.steps_s[_SKIPPED:])) * 1e3
