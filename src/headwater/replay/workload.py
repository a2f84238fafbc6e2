"""Changes the load of a trace: faster, with fewer sessions, or with more."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headwater.errors import ConfigError
from headwater.replay.recordings import is_recording, read_recording
from headwater.replay.trace import MAX_TOKEN, TraceRequest, read_trace
from headwater.replay.variants import trunks

_STAGGER_S = 60.0
"""A copy of a session starts up to this much later than the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """The requests to replay and their speed. Small enough to send to another process."""

    trace: Path
    limit: int | None = None
    speed: float = 1.0
    scale: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit must be at least 1 request, got {self.limit}")

    def requests(self) -> list[TraceRequest]:
        """The requests, sorted by time. Raises ConfigError if there are none."""
        read = read_recording if is_recording(self.trace) else read_trace
        requests = read(self.trace, self.limit)
        if not requests:
            raise ConfigError(f"the trace {self.trace} has no requests; give another file")
        requests.sort(key=lambda request: request.arrival_s)
        return at_speed(scaled(requests, self.scale, seed=self.seed), self.speed)


def at_speed(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests in 1 / `factor` of the time."""
    if not 0 < factor < float("inf"):
        raise ConfigError(f"--speed must be a positive factor such as 2 or 0.5, got {factor}")
    if factor == 1:
        return list(requests)
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def scaled(requests: Sequence[TraceRequest], factor: float, *, seed: int) -> list[TraceRequest]:
    """`factor` times the sessions: below 1 a random part of them; above 1 copies, which share
    with the original only the beginnings that sessions share anyway."""
    if not 0 < factor < float("inf"):
        raise ConfigError(f"--scale must be a positive factor such as 2 or 0.5, got {factor}")
    if factor == 1 or not requests:
        return list(requests)
    shared = trunks(requests)
    stride = 1 + max((i for request in requests for i in request.hash_ids), default=0)
    if stride * int(np.ceil(factor)) * requests[0].block_tokens > MAX_TOKEN:
        raise ConfigError(
            f"--scale {factor:g} makes more different blocks than can be numbered; lower it"
        )
    sessions = [
        next((i for i in request.hash_ids if i not in shared), -1) for request in requests
    ]
    made = []
    for copy in range(int(np.ceil(factor))):
        rng = np.random.default_rng((seed, copy))
        kept: dict[int, float | None] = {}
        for request, session in zip(requests, sessions, strict=True):
            if session not in kept:
                stays = rng.random() < factor - copy
                kept[session] = float(rng.random()) * _STAGGER_S if stays else None
            delay_s = kept[session]
            if delay_s is not None:
                made.append(_moved(request, copy * stride, delay_s if copy else 0.0, shared))
    made.sort(key=lambda request: request.arrival_s)
    return made


def _moved(
    request: TraceRequest, offset: int, delay_s: float, shared: set[int]
) -> TraceRequest:
    """The same request in another session: its own ids are moved by `offset`, those of the
    shared beginning stay."""
    if not offset:
        return request
    ids = [i if i in shared else i + offset for i in request.hash_ids]
    return replace(request, hash_ids=ids, arrival_s=request.arrival_s + delay_s)
