"""Helpers for tests of several ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headwater.device.builtin import LlamaShape
from headwater.engine.llm import Completion, OfflineEngine
from headwater.launch.llm import LLM
from headwater.scheduler.request import SamplingParams

SHAPE = LlamaShape(layers=2, hidden=64, ffn=96, heads=8, kv_heads=2, head_dim=16)
BLOCK = 8

Open = Callable[..., LLM]
"""Opens an engine with further settings."""


def make_prompts(seed: int, *sizes: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size).tolist() for size in sizes]


def make_params(count: int = 12) -> list[SamplingParams]:
    """Parameters of two prompts: the first is greedy, the second sampled with a seed."""
    return [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=count, ignore_eos=True),
    ]


def say(
    engine: OfflineEngine, prompts: list[list[int]], params: list[SamplingParams] | None = None
) -> tuple[list[list[int]], dict[str, int]]:
    """The output, and the tiers in which prompts were found."""
    answers = engine.generate(prompts, params or make_params())
    engine.core.drain(10.0)
    return [answer.tokens for answer in answers], found_by_tier(answers)


def found_by_tier(answers: list[Completion]) -> dict[str, int]:
    """Tokens of all prompts that each tier had."""
    found: dict[str, int] = {}
    for answer in answers:
        assert answer.usage is not None
        for tier, tokens in answer.usage.by_tier.items():
            found[tier] = found.get(tier, 0) + tokens
    return found


def rank_pids(engine: OfflineEngine) -> list[int]:
    runner: Any = engine.core._runner
    return [rank.process.pid for rank in runner._ranks._ranks]
