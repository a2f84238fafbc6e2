"""Hits of a prefill/decode pair on a trace, compared with one mixed instance of the size of its
P.

The trace is scaled down: one of its blocks is a block of four tokens here. Complete engines
without a model serve the requests one after the other. Their outputs differ from those of the
trace, so all hits are on earlier prompts.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench._workload import make_sessions
from headwater.clock import VirtualClock
from headwater.replay.trace import TraceRequest, read_trace
from headwater.scheduler.request import Request, SamplingParams
from headwater.testing.fabric import HeldFabric
from headwater.testing.peers import EchoPair, EchoPeer
from headwater.types import RequestId

_BLOCK_TOKENS = 4
_SCALE = 512 // _BLOCK_TOKENS
_CAPACITY_BLOCKS = 5_859
"""Device blocks of each prefill or mixed instance: room for three million tokens of the
trace."""

_ALONE = {"output_caching": False}


def measure_hits(trace: Path | None, quick: bool) -> dict[str, Any]:
    """`pd_hits`: the share of prompt tokens that the pair and the mixed instance each find, and
    the first share divided by the second."""
    limit = 300 if quick else 4_000
    traced = make_sessions(limit, seed=0)[:limit] if trace is None else read_trace(trace, limit)
    requests = [_request(number, entry) for number, entry in enumerate(traced)]
    total = sum(len(request.tokens) for request in requests)
    mixed, pair = _mixed(requests) / total, _pair(requests) / total
    return {"pd_hits": {"mixed": mixed, "pd": pair, "ratio": pair / mixed if mixed else 1.0}}


def _request(number: int, entry: TraceRequest) -> Request:
    ids = np.array(entry.hash_ids, dtype=np.int32) * _BLOCK_TOKENS
    tokens = np.add.outer(ids, np.arange(_BLOCK_TOKENS, dtype=np.int32)).ravel()
    max_tokens = max(entry.output_length // _SCALE, 1)
    return Request(
        request_id=RequestId(f"r{number}"),
        tokens=tokens,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_s=0.0,
    )


def _mixed(requests: Iterable[Request]) -> int:
    peer = EchoPeer(
        fabric=HeldFabric(),
        clock=VirtualClock(),
        name="m",
        num_blocks=_CAPACITY_BLOCKS,
        settings=_ALONE,
    )
    for request in requests:
        peer.add(request)
        while request.request_id not in peer.reasons:
            peer.step()
    return sum(usage.cached_tokens for usage in peer.usages.values())


def _pair(requests: Iterable[Request]) -> int:
    pair = EchoPair(num_blocks=_CAPACITY_BLOCKS, settings=_ALONE)
    for request in requests:
        pair.decode.add(replace(request, prefill="p"))
        pair.run(request.request_id)
    return sum(usage.cached_tokens for usage in pair.decode.usages.values())
