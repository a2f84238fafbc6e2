"""Warm-up steps that are computed before the engine is ready, so that no request waits for a
compiler.

There is one step of each kind that a request can cause: prompts of many lengths, with and
without a cached prefix, alone and with decodes, whole and in chunks, and every kind of
sampling. The tokens are zeros, and the blocks are the first ones of the empty pool.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import SamplingParams
from headwater.types import RequestId

_GREEDY = SamplingParams(temperature=0.0)

SAMPLED = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.8, top_k=50, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, min_p=0.05, seed=7),
    SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias={1: 2.0}, max_tokens=4, min_tokens=2),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, logprobs=0),
)
"""One of each kind of sampling."""

_PROMPTS = (
    2,
    3,
    16,
    17,
    48,
    65,
    100,
    128,
    200,
    256,
    384,
    512,
    640,
    777,
    1024,
    1500,
    2048,
    4096,
)
"""Lengths of prompts, because libraries choose kernels by length; and the largest step."""

_SUFFIXES = (2, 16, 33, 64, 100, 512, 2048)
_PREFIXES = (64, 700, 4096, 32_000)
_DECODES = (1, 2, 5, 16, 33, 100, 250)
_CHUNKS = (2, 64, 300, 1024)
_LONG_SUFFIXES = ((2, 40_000), (64, 4096))
"""Short chunks, with the tokens before them, that are too long to run as decode rows."""


class WarmLimits(NamedTuple):
    """Limits of the engine's steps."""

    max_rows: int
    max_tokens: int
    """Maximum number of tokens of a step."""

    max_context: int
    """Maximum number of tokens of one sequence."""

    block_tokens: int


class _Row(NamedTuple):
    num_new: int
    num_cached: int = 0


def warm_steps(limits: WarmLimits) -> Iterator[ScheduledBatch]:
    """The steps, within the limits of the engine."""
    for rows, params, samples in _shapes():
        fitting = _within(rows, limits)
        if fitting:
            yield _batch(fitting, params, limits, samples=samples)


def _shapes() -> Iterator[tuple[list[_Row], Sequence[SamplingParams], bool]]:
    """Rows of each step, how they sample, and whether the last row is sampled at all."""
    for length in (*_PROMPTS, 1 << 30):
        yield [_Row(length)], [_GREEDY], True
    yield [_Row(1000)], [_GREEDY], False
    for length in _SUFFIXES:
        for cached in _PREFIXES:
            yield [_Row(length, cached)], [_GREEDY], True
            yield [_Row(length, cached)], [_GREEDY], False
    for num_decodes in _DECODES:
        decodes = [_Row(1, 100 + row % 50) for row in range(num_decodes)]
        for length in _CHUNKS:
            yield [*decodes, _Row(length)], [_GREEDY], True
            yield [*decodes, _Row(length, 700)], [_GREEDY], False
        for length, cached in _LONG_SUFFIXES:
            yield [*decodes, _Row(length, cached)], [_GREEDY], True
        yield [*decodes, _Row(100), _Row(200, 64), _Row(300, 1000)], [_GREEDY], True
    yield [_Row(length) for length in (10, 100, 1000)], [_GREEDY], True
    for params in SAMPLED:
        yield [_Row(1, 100)], [params], True
        yield [_Row(100)], [params], True
        yield [*(_Row(1, 100) for _ in range(5)), _Row(100)], [params], True
    several = [*(_Row(1, 100) for _ in SAMPLED), _Row(100), _Row(50, 64)]
    yield several, [*SAMPLED, _GREEDY], True
    # More alternatives than the kernels support: torch sorts.
    yield [_Row(1, 100), _Row(100)], [SamplingParams(temperature=0.0, logprobs=40)], True
    yield [_Row(100)], [SamplingParams(temperature=0.0, prompt_logprobs=2)], True
    yield [_Row(100, 64)], [SamplingParams(temperature=0.0, prompt_logprobs=0)], True


def _within(rows: Sequence[_Row], limits: WarmLimits) -> list[_Row]:
    """The rows, shortened to the limits; empty if no row of this kind fits."""
    fitting: list[_Row] = []
    left = limits.max_tokens
    for num_new, num_cached in rows[-limits.max_rows :]:
        new = min(num_new, left, limits.max_context)
        cached = min(num_cached, limits.max_context - new)
        if new < 1 or (num_cached and not cached):
            continue
        fitting.append(_Row(new, cached))
        left -= new
    return fitting


def _batch(
    rows: Sequence[_Row], params: Sequence[SamplingParams], limits: WarmLimits, *, samples: bool
) -> ScheduledBatch:
    counts = np.array([row.num_new for row in rows], dtype=np.int32)
    starts = np.array([row.num_cached for row in rows], dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    sampled = np.arange(len(rows) if samples else len(rows) - 1, dtype=np.int32)
    positions = [
        np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)
    ]
    contexts = starts + counts
    widths = -(-contexts // limits.block_tokens)
    chosen = [params[row % len(params)] for row in range(len(sampled))]
    scored = {
        row: (np.zeros(int(counts[row]) - 1, dtype=np.int32), chosen[row].prompt_logprobs or 0)
        for row in range(len(sampled))
        if chosen[row].prompt_logprobs is not None and counts[row] > 1
    }
    return ScheduledBatch(
        step=0,
        request_ids=[RequestId(f"warm-{row}") for row in range(len(rows))],
        tokens=np.zeros(int(counts.sum()), dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=query_start,
        context_lens=contexts,
        block_tables=[np.arange(width, dtype=np.int64) for width in widths],
        sampled=sampled,
        params=chosen,
        histories=[
            (np.zeros(int(contexts[row]), dtype=np.int32), int(contexts[row]))
            for row in sampled
        ],
        scored=scored,
        carry=np.full(len(rows), -1, dtype=np.int32),
    )
