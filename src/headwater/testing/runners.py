"""Runners without a model that detect errors: doubles for the engine loop.

They need no torch. They read and write their memory as a model would, so a block that is freed
too early, read too early or put in the wrong place changes the output tokens.
"""

import threading
from collections import deque
from collections.abc import Callable
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headwater.scheduler.batch import NO_TOKEN, ScheduledBatch, StepResult
from headwater.scheduler.request import SamplingParams, TokenLogprobs
from headwater.types import JobId, Slots, Tokens

_UNWRITTEN = -1


def echo_token(
    tokens: Tokens, params: SamplingParams, *, prompt_tokens: int, vocab_size: int
) -> int:
    """The token that `EchoRunner` samples after `tokens`, whatever else is in the batch."""
    token = crc32(tokens.tobytes(), params.seed) % vocab_size
    if len(tokens) - prompt_tokens < params.min_tokens:
        while token in params.stop_token_ids:
            token = (token + 1) % vocab_size
    return token


class EchoRunner:
    """Samples each token as a hash of all KV that its row sees through its block table.

    Its KV is the token and the position, at the index given by slot and offset. A row that sees
    a wrong position raises an error at once. A row that sees a wrong token samples another next
    token, and all later tokens differ.

    With `layerwise`, rows may read a load in flight: `arrive`, if given, is called with its job
    when the row is computed, as a device waits for layers. A row that reads a failed load sees
    garbage and samples a token that must never be emitted.

    With `depth` 2, a batch is computed when it is collected, as late as a device might. So
    changes to its slots after the submission would affect the result.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        depth: int = 1,
        vocab_size: int = 50_000,
        layerwise: bool = False,
    ) -> None:
        self.depth = depth
        self.layerwise = layerwise
        self.arrive: Callable[[JobId], None] | None = None
        self.is_late: Callable[[], bool] | None = None
        """Decides for each row with a grammar whether its mask is late; None means never."""
        self.vocab_size = vocab_size
        self._block_tokens = block_tokens
        kv = np.full((num_blocks, 2, block_tokens), _UNWRITTEN, dtype=np.int32)
        self._tokens, self._positions = kv[:, 0], kv[:, 1]
        self.rows: NDArray[np.uint8] = kv.reshape(num_blocks, -1).view(np.uint8)
        """The bytes of each block, for copiers."""
        self._submitted: deque[ScheduledBatch] = deque()
        self._previous: dict[int, int] = {}
        """Sampled tokens of the last computed batch, by row."""
        self._before: dict[int, int] = {}
        """Sampled tokens of the batch before the one that `collect` computes, by row. Carried
        tokens come from here."""
        self.num_steps = 0
        self.num_tokens = 0
        """Tokens computed so far; cached tokens are not included."""
        self.closed = False

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue `batch`."""
        if len(self._submitted) >= self.depth:
            raise AssertionError(f"more than {self.depth} steps in flight")
        if batch.step != self.num_steps + len(self._submitted):
            raise AssertionError(f"step {batch.step} is not the next one")
        if len(batch.query_start) != batch.num_rows + 1 or np.any(
            np.diff(batch.query_start) < 1
        ):
            raise AssertionError(f"a row of step {batch.step} computes nothing")
        for earlier in self._submitted:
            self._require_apart(earlier, batch)
        self._submitted.append(batch)

    def collect(self) -> StepResult:
        """Compute the oldest batch."""
        batch = self._submitted.popleft()
        if batch.awaits and not self.layerwise:
            raise AssertionError(f"step {batch.step} reads loads that have not ended")
        if self.arrive is not None:
            for job in batch.awaits.values():
                self.arrive(job)
        tokens = self._write(batch)
        self._before = self._previous
        chosen = [
            NO_TOKEN
            if self._is_void(batch, row, params)
            else self._choose(batch, row, params, history)
            for row, params, history in zip(
                batch.sampled.tolist(), batch.params, batch.histories, strict=True
            )
        ]
        self._previous = dict(zip(batch.sampled.tolist(), chosen, strict=True))
        self.num_steps += 1
        self.num_tokens += len(tokens)
        return StepResult(
            step=batch.step,
            tokens=np.array(chosen, dtype=np.int32),
            logprobs=[
                _logprobs(params, token)
                for params, token in zip(batch.params, chosen, strict=True)
            ],
        )

    def close(self) -> None:
        """Nothing to release."""
        self.closed = True

    def in_flight_slots(self) -> Slots:
        """Slots that submitted batches may still read or write. For checks."""
        tables = [table for batch in self._submitted for table in batch.block_tables]
        return np.unique(np.concatenate(tables)) if tables else np.empty(0, dtype=np.int64)

    def _require_apart(self, earlier: ScheduledBatch, batch: ScheduledBatch) -> None:
        """Raise if `batch` writes to slots that another sequence still uses in `earlier`."""
        users = {
            int(slot): name
            for name, table in zip(earlier.request_ids, earlier.block_tables, strict=True)
            for slot in table
        }
        for row, name in enumerate(batch.request_ids):
            start = int(batch.positions[batch.query_start[row]]) // self._block_tokens
            for slot in batch.block_tables[row][start:]:
                if users.get(int(slot), name) != name:
                    raise AssertionError(f"{name} was given slot {slot}, which is in flight")

    def _write(self, batch: ScheduledBatch) -> Tokens:
        """Write every token of `batch` to the place in its row's block table; return the
        tokens."""
        tokens = batch.tokens.copy()
        for row, source in enumerate(batch.carry.tolist()):
            if source >= 0:
                tokens[batch.query_start[row]] = self._previous[source]
        for row, table in enumerate(batch.block_tables):
            mine = slice(batch.query_start[row], batch.query_start[row + 1])
            positions = batch.positions[mine]
            slots = table[positions // self._block_tokens]
            offsets = positions % self._block_tokens
            self._tokens[slots, offsets] = tokens[mine]
            self._positions[slots, offsets] = positions
        return tokens

    def _is_void(self, batch: ScheduledBatch, row: int, params: SamplingParams) -> bool:
        """Whether the row gets no token: its mask is late, or its carried token is missing."""
        source = int(batch.carry[row])
        if source >= 0 and self._before.get(source) == NO_TOKEN:
            return True
        return bool(params.grammar) and self.is_late is not None and self.is_late()

    def _choose(
        self,
        batch: ScheduledBatch,
        row: int,
        params: SamplingParams,
        history: tuple[Tokens, int],
    ) -> int:
        end = int(batch.context_lens[row])
        table = batch.block_tables[row]
        positions = self._positions[table].reshape(-1)[:end]
        if row not in batch.awaits and not np.array_equal(positions, np.arange(end)):
            raise AssertionError(f"{batch.request_ids[row]} sees KV of other positions")
        seen = self._tokens[table].reshape(-1)[:end]
        return echo_token(seen, params, prompt_tokens=history[1], vocab_size=self.vocab_size)


def _logprobs(params: SamplingParams, token: int) -> TokenLogprobs | None:
    if params.logprobs is None:
        return None
    return TokenLogprobs(chosen=-0.5, rank=1, top_ids=(token,), top_values=(-0.5,))


class HangingRunner(EchoRunner):
    """A device on which no step ends, like a kernel that hangs."""

    def collect(self) -> StepResult:
        threading.Event().wait()
        raise AssertionError("nothing sets the event")
