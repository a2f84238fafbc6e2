"""TorchRunner: runs one `ScheduledBatch` after another on a device."""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headwater.device.attention.prefill import kernel_for
from headwater.device.budget import CONTIGUOUS_SHARE
from headwater.device.contiguous_kv import ContiguousKV
from headwater.device.fp8_kv import open_pool
from headwater.device.inputs import StepInputs, build
from headwater.device.model import LoadedModel
from headwater.device.parallel.messages import WarmPhase
from headwater.device.penalties import History, is_penalised
from headwater.device.prompt_scores import PromptScores
from headwater.device.sampler import SampledRows, Sampler
from headwater.engine.masks import MaskedRow, MaskWorkers, PendingMasks, StepMasks
from headwater.errors import ConfigError, InvariantError
from headwater.scheduler.batch import NO_TOKEN, ScheduledBatch, StepResult
from headwater.types import Tokens


class TorchRunner:
    """The engine's `Runner` over torch. Used by one thread, which may call `submit` and
    `collect` in any order.

    On a CPU `submit` computes the step. With `depth` 2 a second step may be submitted before
    the first is collected; it takes its carried tokens from the first.
    """

    layerwise = False

    def __init__(  # noqa: PLR0913 -- sizes, each by its name
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        depth: int = 1,
        contiguous_bytes: int | None = None,
        shared: bool = False,
        masks: MaskWorkers | None = None,
    ) -> None:
        """Without `masks`, rows with a grammar cannot be run."""
        if depth not in (1, 2):
            raise ConfigError(f"a runner must have 1 or 2 steps in flight, got {depth}")
        self.depth = depth
        self._model = model
        self.pool = open_pool(
            model, num_blocks=num_blocks, block_tokens=block_tokens, shared=shared
        )
        kernel_for(self.pool)  # compiled now if necessary, and not in the first step
        if contiguous_bytes is None:
            contiguous_bytes = int(self.pool.num_bytes * CONTIGUOUS_SHARE)
        # A row has at least one token, so no step has more rows than either limit.
        max_buffers = min(max_num_seqs, max_batched_tokens)
        self._buffers = ContiguousKV(
            self.pool, max_buffers=max_buffers, max_bytes=contiguous_bytes
        )
        self._sampler = Sampler(model.eos_token_ids)
        self._masks = masks
        self.announce: Callable[[ScheduledBatch, Tokens], None] | None = None
        """Called with each step before it is computed, if other ranks compute it too."""
        self.announce_warm: Callable[[WarmPhase], None] | None = None
        """Not called: nothing is prepared on a CPU."""
        self._results: deque[StepResult] = deque()
        self._last: tuple[ScheduledBatch, StepResult] | None = None

    def submit(self, batch: ScheduledBatch) -> None:
        """Compute one step; `collect` returns its result."""
        carried = self._carried(batch)
        tokens = batch.tokens
        if carried:
            tokens = tokens.copy()
            rows = np.fromiter(carried, dtype=np.int64)
            known = np.fromiter(carried.values(), dtype=np.int32)
            # A carried token can be missing (-1); the result of its row is not used.
            tokens[batch.query_start[rows]] = known.clip(min=0)
        pending = begin_masks(self._masks, batch, carried)
        with torch.inference_mode():
            logits = self.compute(batch, tokens)
            masks = None if pending is None else pending.take(is_alone=is_masked(batch))
            chosen, logprobs = self._sampler.choose(
                logits[: len(batch.sampled)], _sampled_rows(batch, carried, masks)
            )
        result = StepResult(step=batch.step, tokens=chosen, logprobs=logprobs)
        void_unmasked(result, batch, carried, masks)
        if batch.scored:
            places = logits[len(batch.sampled) :]
            result.scores = PromptScores(batch, lambda start, end: places[start:end]).read()
        self._results.append(result)
        self._last = batch, result

    def follow(self, batch: ScheduledBatch) -> None:
        """Compute this rank's part of a step that rank 0 samples."""
        with torch.inference_mode():
            self.compute(batch, batch.tokens)

    def prepare(self, phase: WarmPhase) -> None:
        """Nothing to do: a CPU needs no preparation."""

    def collect(self) -> StepResult:
        """The result of the oldest step in flight."""
        return self._results.popleft()

    def use(self, model: LoadedModel) -> None:
        """Compute with other weights of the same shape from the next step on."""
        self._model = model

    def close(self) -> None:
        """Discard steps that were not collected, and end the threads of the masks."""
        if self._masks is not None:
            self._masks.close()
        self._results.clear()
        self._last = None

    def compute(self, batch: ScheduledBatch, tokens: Tokens) -> Tensor:
        """Run the model over `tokens`, those of `batch` with carried ones filled in. Returns
        the logits of the sampled rows, then those of the scored places."""
        if self.announce is not None:
            self.announce(batch, tokens)
        inputs: StepInputs = build(
            batch, tokens, pool=self.pool, buffers=self._buffers, min_rows=self._model.min_rows
        )
        output = self._model.module(
            input_ids=inputs.tokens,
            position_ids=inputs.positions,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=inputs.logits_at,
            attention_step=inputs.attention,
            tokens_read=inputs.logits_at,
        )
        inputs.attention.finish()
        logits: Tensor = output.logits[0]
        return logits

    def _carried(self, batch: ScheduledBatch) -> dict[int, int]:
        """The token that each row with a carry got from the previous step."""
        rows = np.flatnonzero(batch.carry >= 0)
        if len(rows) == 0:
            return {}
        if self._last is None:
            raise InvariantError("a first batch has nothing to carry")
        before, result = self._last
        place = np.full(before.num_rows, -1, dtype=np.int64)
        place[before.sampled] = np.arange(len(before.sampled))
        places = place[batch.carry[rows]]
        if (places < 0).any():
            raise InvariantError("a carry names a row that chose no token")
        return dict(zip(rows.tolist(), result.tokens[places].tolist(), strict=True))


def is_masked(batch: ScheduledBatch) -> bool:
    """Whether every row of the step has a grammar."""
    return len(batch.params) == batch.num_rows and all(p.grammar for p in batch.params)


def begin_masks(
    masks: MaskWorkers | None,
    batch: ScheduledBatch,
    carried: dict[int, int],
) -> PendingMasks | None:
    """Start to make masks for the rows with a grammar; None if there are none. A row gets none
    if the token before it was not sampled."""
    rows = []
    sampled = batch.sampled.tolist()
    for i, params in enumerate(batch.params):
        if not params.grammar:
            continue
        token = carried.get(sampled[i])
        if token == NO_TOKEN:
            continue
        tokens, prompt_len = batch.histories[i]
        name = batch.request_ids[sampled[i]]
        rows.append(MaskedRow(i, name, params.grammar, tokens[prompt_len:], token))
    if not rows:
        return None
    if masks is None:
        raise InvariantError("a row has a grammar, and this runner has no masks")
    return masks.begin(rows)


def void_unmasked(
    result: StepResult,
    batch: ScheduledBatch,
    carried: dict[int, int],
    masks: StepMasks | None,
) -> None:
    """Discard the tokens of rows with a grammar whose mask was late."""
    if masks is not None:
        for i in (*masks.late, *masks.failed):
            result.tokens[i] = NO_TOKEN
        result.failures.update(masks.failed)
    for i, row in enumerate(batch.sampled.tolist()):
        if carried.get(row) == NO_TOKEN:
            result.tokens[i] = NO_TOKEN


def _sampled_rows(
    batch: ScheduledBatch, carried: dict[int, int], masks: StepMasks | None
) -> SampledRows:
    histories: dict[int, History] = {}
    for i, params in enumerate(batch.params):
        if is_penalised(params):
            tokens, prompt_len = batch.histories[i]
            row = int(batch.sampled[i])
            if row in carried:
                tokens = np.append(tokens, np.int32(carried[row]))
            histories[i] = tokens, prompt_len
    return SampledRows(
        params=batch.params,
        positions=batch.context_lens[batch.sampled].astype(np.int64),
        prompt_lens=batch.prompt_lens,
        histories=histories,
        masks=masks,
    )
