"""Small traces for replay tests, and the paths of the public ones if they are present."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from headwater.replay.cost import (
    GIB,
    OWN_LINKS,
    PEER_LINK,
    SHARED_LINKS,
    LinkCost,
    Machine,
    StepCost,
)
from headwater.replay.settings import SimConfig
from headwater.replay.trace import TRACE_BLOCK, TraceRequest, read_trace

TRACES = os.environ.get("HEADWATER_TRACES")
needs_traces = pytest.mark.skipif(
    TRACES is None, reason="HEADWATER_TRACES names no folder with the public traces"
)


def public_trace(name):
    return read_trace(Path(TRACES or "") / f"{name}_trace.jsonl")


def make_request(ids, at_s=0.0, output=10):
    """A request whose last block is half full."""
    return TraceRequest(list(ids), len(ids) * TRACE_BLOCK - 256, output, at_s)


@st.composite
def traces(draw, max_blocks=12, max_requests=30):
    """Paths in a tree: an id has one predecessor, as in every trace."""
    parents = draw(st.lists(st.integers(0, max_blocks), min_size=1, max_size=max_blocks))
    paths: list[list[int]] = []
    for block, drawn in enumerate(parents):
        parent = drawn % (block + 1)
        paths.append([*(paths[parent - 1] if parent else []), block])
    asked = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=max_requests))
    return [make_request(path, at_s=float(number)) for number, path in enumerate(asked)]


def make_small_trace(num_requests, seed=1, every_s=0.02):
    """Alternating short conversations in blocks of 16 tokens: prompts grow and return."""
    rng = np.random.default_rng(seed)
    next_id, now_s = 4, 0.0
    open_ids: list[list[int]] = [[number % 4] for number in range(12)]
    requests = []
    for _ in range(num_requests):
        which = int(rng.integers(len(open_ids)))
        added = int(rng.integers(1, 6))
        ids = [*open_ids[which], *range(next_id, next_id + added)]
        next_id += added
        open_ids[which] = [which % 4] if rng.random() < 0.1 or len(ids) > 40 else ids
        now_s += float(rng.exponential(every_s))
        length = len(ids) * 16 - int(rng.integers(16))
        requests.append(TraceRequest(ids, length, int(rng.integers(1, 80)), now_s, 16))
    return requests


def make_machine(**changes: Any) -> Machine:
    """Small and slow: tens of blocks, steps of milliseconds, links that are often busy."""
    links = {
        name: LinkCost(bytes_s=4e5, latency_s=2e-4, max_jobs=2, step_share=0.1)
        for name in (*OWN_LINKS, *SHARED_LINKS, PEER_LINK)
    }
    machine = Machine(
        name="small",
        kv_token_bytes=64,
        step=StepCost(
            launch_s=1e-3,
            weights_s=1e-3,
            token_s=2e-5,
            pair_s=1e-8,
            row_s=1e-5,
            context_token_s=1e-7,
        ),
        links=links,
        device_gib=128 * 16 * 64 / GIB,
        max_num_seqs=16,
        max_batched_tokens=128,
    )
    return replace(machine, **changes)


def make_config(**changes: Any) -> SimConfig:
    """A deployment of small machines, of 128 device blocks each."""
    settings: dict[str, Any] = {"machine": make_machine(), "block_tokens": 16}
    return SimConfig(**(settings | changes))


def gib(num_blocks):
    """The memory of this many blocks of a small machine."""
    return num_blocks * 16 * 64 / GIB
