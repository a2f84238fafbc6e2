"""Requests for benchmarks, made from a seed."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from headwater.replay.trace import TRACE_BLOCK, TraceRequest


def make_workload(limit: int, seed: int = 1) -> list[TraceRequest]:
    """Alternating conversations: a few shared system prompts, and prompts that grow."""
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


def make_sessions(limit: int, seed: int = 1) -> list[TraceRequest]:
    """Sessions over time: users arrive, ask, wait, ask again or leave, in a few roles.

    Half of them chat, a third asks about a long document, the others are agents that are fast
    and take many turns. Each role has a system prompt.
    """
    rng = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    next_id, begins_s = 16, 0.0
    while len(requests) < limit * 2:
        begins_s += float(rng.exponential(0.6))
        made, next_id = _session(rng, begins_s, next_id)
        requests += made
    # Sessions that have begun by then are cut off, as in any recording.
    return sorted(requests, key=lambda request: request.arrival_s)[:limit]


def _session(
    rng: np.random.Generator, begins_s: float, next_id: int
) -> tuple[list[TraceRequest], int]:
    """The requests of one session, and the next unused id."""
    role = int(rng.choice(3, p=(0.5, 0.35, 0.15)))
    think_s, leaves, first = ((60.0, 0.5, 4), (25.0, 0.35, 40), (4.0, 0.12, 12))[role]
    ids = [role]
    at_s, added = begins_s, int(rng.geometric(1 / first))
    requests = []
    while True:
        ids = [*ids, *range(next_id, next_id + added)]
        next_id += added
        length = len(ids) * TRACE_BLOCK - int(rng.integers(TRACE_BLOCK))
        output = int(rng.geometric(1 / (300 if role < 2 else 80)))
        requests.append(TraceRequest(ids, length, output, at_s))
        if rng.random() < leaves or len(ids) > 240:
            return requests, next_id
        at_s += float(rng.lognormal(np.log(think_s), 1.0)) + output / 40
        # The last id was not full: in the next turn another id replaces it.
        ids, added = ids[:-1] if len(ids) > 1 else ids, int(rng.geometric(0.5))
