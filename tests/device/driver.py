"""Drives a runner directly: sequences with their own slots, steps of any composition."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.device.model import LoadedModel
from headwater.device.runner import TorchRunner
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.request import SamplingParams
from headwater.types import RequestId, Tokens

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Running:
    """One sequence: its tokens so far, how many of them have KV, and where."""

    name: str
    tokens: list[int]
    num_prompt: int
    slots: list[int]
    params: SamplingParams = GREEDY
    num_computed: int = 0
    results: list[Any] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    """Takes slots in shuffled order, makes batches, and tracks its sequences."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        block_tokens: int = 16,
        num_blocks: int = 64,
        depth: int = 1,
        contiguous_bytes: int | None = 1 << 26,
        seed: int = 0,
        max_num_seqs: int = 8,
        runner_class: Any = None,
    ) -> None:
        """A `runner_class` other than `TorchRunner` knows neither depth nor buffers."""
        own: dict[str, Any] = {}
        if runner_class is None:
            own = {"depth": depth, "contiguous_bytes": contiguous_bytes}
        self.runner: Any = (runner_class or TorchRunner)(
            model,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=256,
            **own,
        )
        self.block_tokens = block_tokens
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._step = 0
        self._submitted: list[list[tuple[Running, int]]] = []
        self._sampled_at: list[list[int | None]] = []

    def add(
        self,
        tokens: Tokens,
        *,
        name: str = "a",
        params: SamplingParams = GREEDY,
        shared: Items[int] = (),
    ) -> Running:
        """A new sequence; `shared` are slots whose full blocks are already written."""
        computed = len(shared) * self.block_tokens
        return Running(name, tokens.tolist(), len(tokens), list(shared), params, computed)

    def free(self, sequence: Running, *, but: int = 0) -> None:
        """Free its slots, except the first `but`."""
        self._free.extend(sequence.slots[but:])
        del sequence.slots[but:]

    def step(self, *work: tuple[Running, int]) -> StepResult:
        """Compute this many more tokens of each sequence, and collect."""
        self.submit(*work)
        return self.collect()

    def submit(self, *work: tuple[Running, int]) -> None:
        self.runner.submit(self._batch(work))
        self._submitted.append(list(work))
        for sequence, count in work:
            sequence.num_computed += count

    def collect(self) -> StepResult:
        result: StepResult = self.runner.collect()
        work = self._submitted.pop(0)
        for (sequence, _), at in zip(work, self._sampled_at.pop(0), strict=True):
            if at is not None:
                sequence.tokens.append(int(result.tokens[at]))
                sequence.results.append(result.logprobs[at])
        return result

    def finish(self, *sequences: Running, count: int) -> None:
        """Compute whole prompts, then joint steps until each sequence has `count` new
        tokens."""
        while todo := [s for s in sequences if len(s.output) < count]:
            self.step(*((s, len(s.tokens) - s.num_computed) for s in todo))

    def run_two_ahead(self, prompts: Items[Tokens], *, count: int) -> list[Running]:
        """Rows with `count` tokens each, with two steps in flight. Each step has the rows in the
        opposite order of the one before."""
        rows = [self.add(tokens, name=str(at)) for at, tokens in enumerate(prompts)]
        self.submit(*((row, row.num_prompt) for row in rows))
        order = rows
        for _ in range(count - 1):
            order = order[::-1]
            self.submit(*((row, 1) for row in order))
            self.collect()
        self.collect()
        return rows

    def _batch(self, work: Items[tuple[Running, int]]) -> ScheduledBatch:
        tokens: list[int] = []
        positions: list[int] = []
        sampled: list[int] = []
        carry: list[int] = []
        starts = [0]
        before = [s.name for s, _ in self._submitted[-1]] if self._submitted else []
        for row, (sequence, count) in enumerate(work):
            first, end = sequence.num_computed, sequence.num_computed + count
            self._grow(sequence, end)
            carried = first == len(sequence.tokens)
            tokens += [-1] if carried else sequence.tokens[first:end]
            carry.append(before.index(sequence.name) if carried else -1)
            positions += range(first, end)
            starts.append(len(tokens))
            if end >= len(sequence.tokens):
                sampled.append(row)
        places = iter(range(len(sampled)))
        self._sampled_at.append(
            [next(places) if r in sampled else None for r in range(len(work))]
        )
        self._step += 1
        chosen = [work[row][0] for row in sampled]
        return ScheduledBatch(
            step=self._step - 1,
            request_ids=[RequestId(s.name) for s, _ in work],
            tokens=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            query_start=np.array(starts, dtype=np.int32),
            context_lens=np.array([s.num_computed + n for s, n in work], dtype=np.int32),
            block_tables=[np.array(s.slots, dtype=np.int64) for s, _ in work],
            sampled=np.array(sampled, dtype=np.int32),
            params=[s.params for s in chosen],
            histories=[(np.array(s.tokens, dtype=np.int32), s.num_prompt) for s in chosen],
            carry=np.array(carry, dtype=np.int32),
        )

    def _grow(self, sequence: Running, num_tokens: int) -> None:
        while len(sequence.slots) * self.block_tokens < num_tokens:
            sequence.slots.append(self._free.pop())
