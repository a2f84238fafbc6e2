"""Requests for benchmarks, made from a seed."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from headwater.replay.trace import TRACE_BLOCK, TraceRequest


def make_workload(limit: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations that take turns: a few shared system prompts, prompts that grow."""
    return list(islice(_conversations(np.random.default_rng(seed)), limit))


def _conversations(rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Endless: 200 open conversations; each turn adds 1 to 20 ids, one in eight is the last."""
    next_id = 8
    open_ids: list[list[int]] = [[] for _ in range(200)]
    while True:
        which = int(rng.integers(len(open_ids)))
        ids = open_ids[which] or [int(rng.integers(8))]
        added = int(rng.geometric(0.15))
        ids = [*ids, *range(next_id, next_id + min(added, 20))]
        next_id += min(added, 20)
        open_ids[which] = [] if rng.random() < 0.125 or len(ids) > 200 else ids
        cut = int(rng.integers(TRACE_BLOCK))
        yield TraceRequest(ids, len(ids) * TRACE_BLOCK - cut, int(rng.geometric(1 / 300)))
