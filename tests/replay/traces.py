"""Small traces for replay tests, and where the public ones are, if they are."""

import os
from pathlib import Path

import pytest
from hypothesis import strategies as st

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
