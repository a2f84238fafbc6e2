"""What could any order of storage writes find? A model of one trace, outside the engine.

Memory is an LRU of whole trace blocks. Storage accepts a quarter of the blocks that are computed
without it, forever keeps what it got, and finds leading runs. At each moment the waiting block
with the highest score whose predecessor is stored is written. The scores are:

- arrival: first come, first served
- uses: most often used first
- table: the chance that a block of this class is used again. A class is the number of uses, the
  distance from the end of the prompt, prompt length, output length, turn and time since the
  turn before. The chances are counted over the whole trace, future included, so that no order
  learned from these attributes could do better.
- oracle: blocks that are used again first

    python benchmarks/storage_order.py conversation_trace.jsonl
"""

import argparse
import heapq
import json
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BLOCKS = 3200
"""200 GiB of blocks of 512 tokens with 128 KiB each."""

SHARE = 0.25
Score = Callable[[int, int, int], float]
"""The score of a block, from the block, its number of uses and the number of the request that
used it last."""


class Trace:
    """The first requests of a trace, when each block is used, and what comes before it."""

    def __init__(self, path: Path, limit: int) -> None:
        with path.open() as lines:
            self.requests: list[dict[str, Any]] = [
                json.loads(x) for x, _ in zip(lines, range(limit), strict=False)
            ]
        self.uses: dict[int, list[int]] = defaultdict(list)
        self.parent: dict[int, int | None] = {}
        for number, request in enumerate(self.requests):
            before = None
            for block in request["hash_ids"]:
                self.uses[block].append(number)
                self.parent.setdefault(block, before)
                before = block
        self._traits = self._request_traits()

    def traits(self, block: int, num_uses: int) -> tuple[int, ...]:
        """The class of a block after so many uses."""
        number = self.uses[block][num_uses - 1]
        ids = self.requests[number]["hash_ids"]
        from_end = len(ids) - 1 - ids.index(block)
        return min(num_uses, 4), bisect_right([1, 2, 4, 8, 16], from_end), *self._traits[number]

    def _request_traits(self) -> list[tuple[int, ...]]:
        turns: list[int] = []
        traits: list[tuple[int, ...]] = []
        for number, request in enumerate(self.requests):
            known = [b for b in request["hash_ids"] if self.uses[b][0] < number]
            turn, gap_s = 1, -1.0
            if len(known) > 1:
                before = max(use for use in self.uses[known[-1]] if use < number)
                turn = turns[before] + 1
                gap_s = (request["timestamp"] - self.requests[before]["timestamp"]) / 1e3
            turns.append(turn)
            traits.append(
                (
                    bisect_right([2e3, 4e3, 8e3, 16e3, 32e3, 64e3], request["input_length"]),
                    bisect_right([10, 50, 100, 200, 400, 800], request["output_length"]),
                    min(turn, 4),
                    bisect_right([0, 30, 120, 600], gap_s),
                )
            )
        return traits


def find(trace: Trace, score: Score, blocks_s: float) -> tuple[float, float]:
    """Shares of all blocks that storage finds and that are computed."""
    memory: OrderedDict[int, None] = OrderedDict()
    stored: set[int] = set()
    uses: Counter[int] = Counter()
    waiting: list[tuple[float, int, int]] = []
    credit, last_ms, total, found, computed = 0.0, 0, 0, 0, 0
    for number, request in enumerate(trace.requests):
        credit = min(credit + (request["timestamp"] - last_ms) / 1e3 * blocks_s, 64.0)
        last_ms = request["timestamp"]
        later = []
        while credit >= 1 and waiting:
            entry = heapq.heappop(waiting)
            _, known, block = entry
            if known != uses[block] or block in stored or block not in memory:
                continue
            before = trace.parent[block]
            if before is not None and before not in stored:
                later += [entry] if before in memory else []
                continue
            stored.add(block)
            credit -= 1
            for each in later:
                heapq.heappush(waiting, each)
            later = []
        for each in later:
            heapq.heappush(waiting, each)
        ids = request["hash_ids"]
        present = next(
            (n for n, b in enumerate(ids) if b not in memory and b not in stored), len(ids)
        )
        found += sum(b not in memory for b in ids[:present])
        computed += len(ids) - present
        total += len(ids)
        for block in reversed(ids):
            memory[block] = None
            memory.move_to_end(block)
            uses[block] += 1
            if block not in stored:
                entry = -score(block, uses[block], number), uses[block], block
                heapq.heappush(waiting, entry)
        while len(memory) > MEMORY_BLOCKS:
            memory.popitem(last=False)
    return found / total, computed / total


def scores(trace: Trace) -> dict[str, Score]:
    """The orders that are compared."""
    uses = trace.uses
    seen: Counter[tuple[int, ...]] = Counter()
    again: Counter[tuple[int, ...]] = Counter()
    for block, numbers in uses.items():
        for count in range(1, len(numbers) + 1):
            traits = trace.traits(block, count)
            seen[traits] += 1
            again[traits] += count < len(numbers)
    mean = again.total() / seen.total()
    print(f"classes: {len(seen)}")

    def chance(block: int, num_uses: int) -> float:
        traits = trace.traits(block, num_uses)
        return (again[traits] + 3 * mean) / (seen[traits] + 3)

    return {
        "arrival": lambda block, count, number: -uses[block][0],
        "uses": lambda block, count, number: 1e6 * count - uses[block][0],
        "table": lambda block, count, number: 1e6 * chance(block, count) - number,
        "oracle": lambda block, count, number: 1e6 * (count < len(uses[block])) - number,
    }


def main() -> None:
    """Print the share that storage finds by each order, and its ratio to arrival."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    trace = Trace(options.trace, options.requests)
    seconds = (trace.requests[-1]["timestamp"] - trace.requests[0]["timestamp"]) / 1e3
    blocks = sum(len(request["hash_ids"]) for request in trace.requests)
    _, computed = find(trace, lambda block, count, number: 0.0, 0.0)
    blocks_s = SHARE * computed * blocks / seconds
    arrival = 0.0
    for name, score in scores(trace).items():
        found, _ = find(trace, score, blocks_s)
        arrival = arrival or found
        print(
            f"{name}: storage finds {found:.2%} of all blocks, {found / arrival:.2f} of arrival"
        )


if __name__ == "__main__":
    main()
