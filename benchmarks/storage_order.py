"""What could an order of storage writes find? A model of one trace, outside the engine.

Memory is an LRU of whole trace blocks. Storage accepts a quarter of the blocks that are computed
without it, forever keeps what it got, and finds leading runs. At each moment the waiting block
with the highest score is written, after the blocks before it. The scores are:

- arrival: first come, first served; a block that was evicted and computed again comes last
- uses: most often used first, also counting uses before an eviction
- learned: the chance that the block is used again after it has left memory, by a neural network.
  It knows 24 attributes of the block and of its session: number of uses, turn, prompt, output
  and growth in tokens, gaps between turns, age of the session, place on the path, branches. It
  was trained on the other half of the trace, so it has seen as much of such traffic as a model
  can, but not these requests.
- oracle: blocks that are used again first

    python benchmarks/storage_order.py conversation_trace.jsonl
"""

import argparse
import heapq
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from math import log1p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

MEMORY_BLOCKS = 3200
"""200 GiB of blocks of 512 tokens with 128 KiB each."""

MEMORY_S = 45.0
"""About how long a block stays in this memory. A return after more than this needs storage."""

SHARE = 0.25
CREDIT_BLOCKS = 64.0
"""Blocks that storage can write at once after it was idle. The trace has a grid of 3 s, in which
a quarter of the computed blocks is 57."""

FOLD = 1500
"""Every second part of this many requests is in the same half of the trace."""

_BLOCK_TOKENS = 512


class Candidate(NamedTuple):
    """A block that waits for its write."""

    block: int
    num_uses: int
    request: int
    """The request that used it last."""

    entered: int
    """The request that brought it into memory."""


Score = Callable[[Candidate], float]


class Trace:
    """The requests of a trace, when each block is used, and what comes before it."""

    def __init__(self, path: Path) -> None:
        with path.open() as lines:
            self.requests: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.times = [request["timestamp"] / 1e3 for request in self.requests]
        self.uses: dict[int, list[int]] = defaultdict(list)
        self.parent: dict[int, int | None] = {}
        for number, request in enumerate(self.requests):
            before = None
            for block in request["hash_ids"]:
                self.uses[block].append(number)
                self.parent.setdefault(block, before)
                before = block

    def leaves_and_returns(self, block: int, num_uses: int) -> bool:
        """Whether the block is used again only after it has left memory."""
        uses = self.uses[block][num_uses - 1 : num_uses + 1]
        return len(uses) == 2 and self.times[uses[1]] - self.times[uses[0]] > MEMORY_S


class Session(NamedTuple):
    """What is known about the session of a request when the request ends."""

    turn: int
    started_s: float
    gap_s: float
    """Time since the turn before; negative if there was none."""

    gap_before_s: float
    num_late: int
    """Turns that came after the blocks had left memory."""


class Runs:
    """Blocks of one request that were used equally often, with attributes and outcome."""

    def __init__(self, trace: Trace) -> None:
        self.number_of: dict[tuple[int, int], int] = {}
        """The run of a block after so many uses."""
        self.rows: list[list[float]] = []
        self.returned: list[float] = []
        self.sizes: list[int] = []
        self.requests: list[int] = []
        self._trace = trace
        self._uses: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._children: dict[int, set[int]] = defaultdict(set)
        self._sessions: list[Session] = []
        for number in range(len(trace.requests)):
            self._add(number)

    def _add(self, number: int) -> None:
        ids = self._trace.requests[number]["hash_ids"]
        tokens = self._trace.requests[number]["input_length"]
        known = [block for block in ids if self._uses[block]]
        before = self._last[known[-1]] if len(known) > 1 else None
        common = self._common(number, before, len(known))
        for block, after in zip(ids, [*ids[1:], None], strict=True):
            self._uses[block] += 1
            self._last[block] = number
            if after is not None:
                self._children[block].add(after)
        start = 0
        while start < len(ids):
            end = start + 1
            while end < len(ids) and self._kind(ids, end, tokens) == self._kind(
                ids, start, tokens
            ):
                end += 1
            place = self._place(ids, start, end, tokens)
            self._append(number, ids[start:end], [*common, *place])
            start = end

    def _common(self, number: int, before: int | None, num_known: int) -> list[float]:
        """Attributes of a request; `before` is the turn before it."""
        request, now = self._trace.requests[number], self._trace.times[number]
        turn = Session(1, now, -1.0, -1.0, 0)
        growth, output_before, relation = -1, -1, 0
        if before is not None:
            past, gap = self._sessions[before], now - self._trace.times[before]
            late = past.num_late + (gap > MEMORY_S)
            turn = Session(past.turn + 1, past.started_s, gap, past.gap_s, late)
            asked = self._trace.requests[before]
            growth = request["input_length"] - asked["input_length"]
            output_before = asked["output_length"]
            relation = 1 if num_known >= asked["input_length"] // _BLOCK_TOKENS else 2
        self._sessions.append(turn)
        amounts = (
            request["input_length"],
            request["output_length"],
            turn.turn,
            growth,
            turn.gap_s,
            turn.gap_before_s,
            output_before,
            now - turn.started_s,
            turn.num_late,
        )
        kinds = (relation == 0, relation == 1, relation == 2, growth < 0, turn.turn == 1)
        return [*map(_scaled, amounts), *map(float, kinds)]

    def _kind(self, ids: list[int], at: int, tokens: int) -> tuple[int, bool, bool]:
        is_partial = at == len(ids) - 1 and tokens % _BLOCK_TOKENS != 0
        return self._uses[ids[at]], len(self._children[ids[at]]) >= 16, is_partial

    def _place(self, ids: list[int], start: int, end: int, tokens: int) -> list[float]:
        """Attributes of blocks [start, end) of a path."""
        uses, is_trunk, is_partial = self._kind(ids, start, tokens)
        amounts = (uses, start, end - start, len(ids) - end, len(self._children[ids[end - 1]]))
        kinds = (is_trunk, is_partial, uses == 1, uses == 2, uses == 3)
        return [*map(_scaled, amounts), *map(float, kinds)]

    def _append(self, number: int, blocks: list[int], row: list[float]) -> None:
        uses = self._uses[blocks[0]]
        for block in blocks:
            self.number_of[block, uses] = len(self.rows)
        outcomes = [self._trace.leaves_and_returns(block, uses) for block in blocks]
        self.rows.append(row)
        self.returned.append(sum(outcomes) / len(blocks))
        self.sizes.append(len(blocks))
        self.requests.append(number)


def _scaled(amount: float) -> float:
    return -1.0 if amount < 0 else log1p(amount)


def chances(runs: Runs) -> np.ndarray:
    """The learned chance of each run. Each half of the trace is predicted from the other."""
    rows = torch.tensor(runs.rows)
    rows = (rows - rows.mean(0)) / (rows.std(0) + 1e-6)
    half = torch.tensor(runs.requests) // FOLD % 2
    outcomes, weights = torch.tensor(runs.returned), torch.tensor(runs.sizes).sqrt()
    found = torch.zeros(len(rows))
    for part in (0, 1):
        train = torch.nonzero(half != part)[:, 0]
        for seed in range(3):
            network = _train(rows[train], outcomes[train], weights[train], seed)
            with torch.no_grad():
                found += torch.sigmoid(network(rows)[:, 0]) * (half == part) / 3
    return found.numpy()


def _train(
    rows: torch.Tensor, outcomes: torch.Tensor, weights: torch.Tensor, seed: int
) -> torch.nn.Module:
    torch.manual_seed(seed)
    network = torch.nn.Sequential(
        torch.nn.Linear(rows.shape[1], 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-3)
    for _ in range(8):
        for batch in torch.split(torch.randperm(len(rows)), 512):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                network(rows[batch])[:, 0], outcomes[batch], weights[batch]
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return network


class Model:
    """Memory and storage while the first `limit` requests of a trace are served."""

    def __init__(self, trace: Trace, limit: int, score: Score, blocks_s: float) -> None:
        self._trace, self._score, self._blocks_s = trace, score, blocks_s
        self._memory: OrderedDict[int, None] = OrderedDict()
        self._stored: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._entered: dict[int, int] = {}
        self._waiting: list[tuple[float, Candidate]] = []
        self._credit = 0.0
        self.total, self.found, self.computed = 0, 0, 0
        before = 0.0
        for number, now in enumerate(trace.times[:limit]):
            self._credit = min(self._credit + (now - before) * blocks_s, CREDIT_BLOCKS)
            before = now
            self._write()
            self._serve(number)

    def _write(self) -> None:
        later = []
        while self._credit >= 1 and self._waiting:
            entry = heapq.heappop(self._waiting)
            candidate = entry[1]
            if candidate.num_uses != self._uses[candidate.block]:
                continue
            for block in self._unstored_path(candidate.block):
                if self._credit < 1:
                    later.append(entry)
                    break
                self._stored.add(block)
                self._credit -= 1
        for entry in later:
            heapq.heappush(self._waiting, entry)

    def _unstored_path(self, block: int) -> list[int]:
        """The blocks to write so that storage finds `block`; none if one left memory."""
        path: list[int] = []
        at: int | None = block
        while at is not None and at not in self._stored:
            if at not in self._memory:
                return []
            path.append(at)
            at = self._trace.parent[at]
        return path[::-1]

    def _serve(self, number: int) -> None:
        ids = self._trace.requests[number]["hash_ids"]
        memory, stored = self._memory, self._stored
        lost = (n for n, b in enumerate(ids) if b not in memory and b not in stored)
        present = next(lost, len(ids))
        self.found += sum(b not in memory for b in ids[:present])
        self.computed += len(ids) - present
        self.total += len(ids)
        for block in reversed(ids):
            if block not in memory:
                self._entered[block] = number
            memory[block] = None
            memory.move_to_end(block)
            self._uses[block] += 1
            if block not in stored:
                candidate = Candidate(block, self._uses[block], number, self._entered[block])
                heapq.heappush(self._waiting, (-self._score(candidate), candidate))
        while len(memory) > MEMORY_BLOCKS:
            memory.popitem(last=False)


def scores(trace: Trace) -> dict[str, Score]:
    """The orders that are compared. Equal blocks are written oldest first."""
    runs = Runs(trace)
    chance = chances(runs)
    return {
        "arrival": lambda c: -c.entered,
        "uses": lambda c: 1e6 * min(c.num_uses, 6) - c.entered,
        "learned": lambda c: (
            1e6 * float(chance[runs.number_of[c.block, c.num_uses]]) - c.entered / 1e3
        ),
        "oracle": lambda c: 1e6 * (c.num_uses < len(trace.uses[c.block])) - c.entered,
    }


def main() -> None:
    """Print the share that storage finds by each order, and its ratio to arrival."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    trace = Trace(options.trace)
    limit = min(options.requests, len(trace.requests))
    seconds = trace.times[limit - 1] - trace.times[0]
    alone = Model(trace, limit, lambda candidate: 0.0, 0.0)
    blocks_s = SHARE * alone.computed / seconds
    arrival = 0.0
    for name, score in scores(trace).items():
        model = Model(trace, limit, score, blocks_s)
        found = model.found / model.total
        arrival = arrival or found
        print(
            f"{name}: storage finds {found:.2%} of all blocks, {found / arrival:.2f} of arrival"
        )


if __name__ == "__main__":
    main()
