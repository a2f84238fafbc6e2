"""Variants of a trace, to test whether a result on one trace holds on similar ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headwater.replay.trace import TraceRequest

_TRUNK_CHILDREN = 16
_SEED = 7


def _first_half(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests that arrive in the first half of the time."""
    middle = _middle(requests)
    return [request for request in requests if request.arrival_s < middle]


def _second_half(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests that arrive in the second half of the time."""
    middle = _middle(requests)
    return [request for request in requests if request.arrival_s >= middle]


def _half_of_sessions(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """A random half of the sessions, with all their requests."""
    shared = trunks(requests)
    rng = np.random.default_rng(_SEED)
    stays: dict[int, bool] = {}
    kept = []
    for request in requests:
        session = next((i for i in request.hash_ids if i not in shared), -1)
        if session not in stays:
            stays[session] = bool(rng.integers(2))
        if stays[session]:
            kept.append(request)
    return kept


def _shuffled_gaps(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests in the same order, with the times between them shuffled."""
    times = np.array([request.arrival_s for request in requests])
    gaps = np.random.default_rng(_SEED).permutation(np.diff(times))
    moved = times[:1].tolist() + (times[0] + np.cumsum(gaps)).tolist() if len(times) else []
    pairs = zip(requests, moved, strict=True)
    return [replace(request, arrival_s=arrival_s) for request, arrival_s in pairs]


def _twice_as_fast(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests in half of the time."""
    return [replace(request, arrival_s=request.arrival_s / 2) for request in requests]


def trunks(requests: Sequence[TraceRequest]) -> set[int]:
    """Ids with many different continuations: beginnings that sessions share."""
    followers: dict[int, set[int]] = {}
    for request in requests:
        for parent, child in zip(request.hash_ids, request.hash_ids[1:], strict=False):
            followers.setdefault(parent, set()).add(child)
    return {parent for parent, after in followers.items() if len(after) >= _TRUNK_CHILDREN}


VARIANTS: dict[str, Callable[[Sequence[TraceRequest]], list[TraceRequest]]] = {
    "as-is": list,
    "first-half": _first_half,
    "second-half": _second_half,
    "half-of-sessions": _half_of_sessions,
    "shuffled-gaps": _shuffled_gaps,
    "twice-as-fast": _twice_as_fast,
}
"""Every variant by its name on the command line."""


def _middle(requests: Sequence[TraceRequest]) -> float:
    if not requests:
        return 0.0
    return (requests[0].arrival_s + requests[-1].arrival_s) / 2
