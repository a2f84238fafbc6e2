"""Engines of several ranks over models of three kinds, and the output of one rank without a
cache."""

from pathlib import Path
from typing import Any

import numpy as np

from headwater.launch.llm import LLM
from headwater.scheduler.request import SamplingParams
from tests.launch.rank_engines import found_by_tier

KINDS = {"dense": "llama", "experts": "qwen3_moe", "latent": "deepseek_v3"}
"""Tiny models of tests/device/families.py, four query heads each: two KV heads, two KV heads and
four experts, one latent that every rank has."""

_BLOCK = 8
_PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=32, ignore_eos=True),
]
"""Prompts are answered with these in turn: greedy, and sampled with a seed."""


def open_engine(model: Path, **settings: Any) -> LLM:
    """Steps of 32 tokens, so that every prompt is computed in chunks."""
    chosen: dict[str, Any] = {
        "block_tokens": _BLOCK,
        "num_blocks_override": 256,
        "max_batched_tokens": 32,
        "max_num_seqs": 8,
        "num_threads": 1,
        "load_policy": "wait",
        "write_policy": "write_through",
    }
    return LLM(str(model), **chosen | settings)


def make_prompts(seed: int) -> list[list[int]]:
    """Six prompts of 40 to 61 tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(1, 128, size).tolist() for size in (45, 61, 52, 40, 57, 49)]


def say(engine: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, int]]:
    """The output, and how many tokens of the prompts each tier had."""
    answers = engine.generate(prompts, [_PARAMS[n % 2] for n in range(len(prompts))])
    engine.core.drain(30.0)
    engine.core.check()
    return [answer.tokens for answer in answers], found_by_tier(answers)


def say_alone(model: Path, seed: int) -> list[list[int]]:
    """The output of one rank that caches nothing."""
    engine = open_engine(model, prefix_caching=False)
    tokens, _ = say(engine, make_prompts(seed))
    engine.core.close()
    return tokens
