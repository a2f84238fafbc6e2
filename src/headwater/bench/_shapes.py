"""Synthetic traffic of different shapes, to test a policy on traffic that it was not tuned
for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from headwater.bench._workload import make_sessions
from headwater.replay.trace import TRACE_BLOCK, TraceRequest

_DRIFTS_S = 400.0
"""Time at which habits change in the shape `drift`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Habit:
    """The behaviour of the sessions of one kind."""

    every_s: float
    """Mean time between two sessions."""

    think_s: float
    """Median time between two turns of one session."""

    leaves: float
    """Chance that a turn is the last."""

    opens: float
    """Mean number of ids in the first prompt of a session, after the shared beginning."""

    grows: float = 2.0
    """Mean number of ids that a turn adds."""

    output: float = 300.0
    beginnings: list[range] = field(default_factory=lambda: [range(4)])
    """Shared ids; each session begins with one of them, earlier ones more often."""


def _chats(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    return _sessions(rng, number, _Habit(every_s=0.6, think_s=60.0, leaves=0.4, opens=5.0))


def _agents(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    habit = _Habit(every_s=2.0, think_s=3.0, leaves=0.08, opens=12.0, grows=3.0, output=80.0)
    return _sessions(rng, number, habit)


def _documents(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    """Each session asks a few questions about one of sixty documents."""
    starts = range(100, 100 + 60 * 60, 60)
    documents = [range(start, start + int(rng.integers(8, 60))) for start in starts]
    habit = _Habit(every_s=0.8, think_s=30.0, leaves=0.5, opens=1.5, beginnings=documents)
    return _sessions(rng, number, habit)


def _scans(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    """Seven of eight sessions are one long prompt that is never seen again; the others are
    chats."""
    once = _Habit(every_s=0.5, think_s=1.0, leaves=1.0, opens=30.0)
    chat = _Habit(every_s=3.5, think_s=40.0, leaves=0.2, opens=6.0)
    return _merged(_sessions(rng, number, once), _sessions(rng, number, chat))


def _loops(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    """Four hundred jobs repeat in the same order: the worst case for an LRU."""
    jobs = [[next(number) for _ in range(int(rng.integers(4, 24)))] for _ in range(400)]
    for turn in count():
        ids = jobs[turn % len(jobs)]
        yield TraceRequest(ids, len(ids) * TRACE_BLOCK, 50, turn * 0.5)


def _drift(rng: np.random.Generator, number: Iterator[int]) -> Iterator[TraceRequest]:
    """Chats for a while, then agents: what was learned first is wrong later."""
    for request in _chats(rng, number):
        if request.arrival_s > _DRIFTS_S:
            break
        yield request
    for request in _agents(rng, number):
        yield TraceRequest(
            request.hash_ids,
            request.input_length,
            request.output_length,
            request.arrival_s + _DRIFTS_S,
        )


_Make = Callable[[np.random.Generator, Iterator[int]], Iterator[TraceRequest]]
_MAKERS: dict[str, _Make] = {
    "agents": _agents,
    "chats": _chats,
    "documents": _documents,
    "drift": _drift,
    "loops": _loops,
    "scans": _scans,
}
SHAPES = ("mixed", *sorted(_MAKERS))
"""Shapes by name on the command line; `mixed` is chats, documents and agents together."""


def make_shape(name: str, limit: int, seed: int) -> list[TraceRequest]:
    """The first `limit` requests of such traffic, sorted by time."""
    if name == "mixed":
        return make_sessions(limit, seed=seed)
    made = _MAKERS[name](np.random.default_rng(seed), count(10_000))
    return [request for _, request in zip(range(limit), made, strict=False)]


def _sessions(
    rng: np.random.Generator, number: Iterator[int], habit: _Habit
) -> Iterator[TraceRequest]:
    """Endless sessions of one habit, sorted by time."""
    begins_s = 0.0
    open_turns: list[TraceRequest] = []
    while True:
        begins_s += float(rng.exponential(habit.every_s))
        open_turns.sort(key=lambda request: request.arrival_s)
        while open_turns and open_turns[0].arrival_s < begins_s:
            yield open_turns.pop(0)
        open_turns += _session(rng, number, habit, begins_s)


def _session(
    rng: np.random.Generator, number: Iterator[int], habit: _Habit, begins_s: float
) -> list[TraceRequest]:
    which = min(int(rng.geometric(2 / (1 + len(habit.beginnings)))), len(habit.beginnings))
    ids = list(habit.beginnings[which - 1])
    added, at_s, turns = habit.opens, begins_s, []
    while True:
        ids = ids + [next(number) for _ in range(int(rng.geometric(1 / added)))]
        output = int(rng.geometric(1 / habit.output))
        length = len(ids) * TRACE_BLOCK - int(rng.integers(TRACE_BLOCK))
        turns.append(TraceRequest(ids, length, output, at_s))
        if rng.random() < habit.leaves or len(ids) > 240:
            return turns
        at_s += float(rng.lognormal(np.log(habit.think_s), 1.0)) + output / 40
        # The last id was not full: in the next turn another id replaces it.
        ids, added = ids[:-1], habit.grows


def _merged(*streams: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    heads = [next(stream) for stream in streams]
    while True:
        first = min(range(len(heads)), key=lambda at: heads[at].arrival_s)
        yield heads[first]
        heads[first] = next(streams[first])
