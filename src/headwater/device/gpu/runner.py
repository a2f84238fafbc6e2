"""CudaRunner: runs one `ScheduledBatch` after another on a GPU, one step ahead of its results.

`submit` only queues work: inputs are sent in one piece, decode steps are replayed graphs, and a
token that the previous step is still sampling is read from device memory. `collect` waits for
one event, spinning in C, and reads the sampled tokens from pinned memory.
"""

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.fp8_kv import open_pool
from headwater.device.gpu.arrivals import Arrivals
from headwater.device.gpu.decoder import FusedDecoder, RowsToCompute
from headwater.device.gpu.fused_check import fused_decoder
from headwater.device.gpu.graphs import DecodeGraphs
from headwater.device.gpu.inputs import Layout, PackedStep, pack
from headwater.device.gpu.kernel_cache import CompilationCounter
from headwater.device.gpu.module import ModuleDecoder
from headwater.device.gpu.sampling import DeviceSampler, PendingLogprobs
from headwater.device.gpu.staging import Staging
from headwater.device.gpu.submitted import (
    SubmittedStep,
    carried_tokens,
    record_begin,
    sampled_rows,
)
from headwater.device.gpu.suffix_graphs import SuffixGraphs
from headwater.device.gpu.warm import warm_chunks
from headwater.device.gpu.warm_steps import WarmLimits, warm_steps
from headwater.device.kernels.greedy import choose_greedy
from headwater.device.kernels.ints import copy_ints
from headwater.device.model import LoadedModel
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import WarmPhase
from headwater.device.parallel.sharding import connect
from headwater.device.prompt_scores import PromptScores
from headwater.device.runner import begin_masks, is_masked
from headwater.device.sampler import LogprobTable, Sampler
from headwater.device.upload import put
from headwater.engine.masks import MaskWorkers, PendingMasks, StepMasks
from headwater.errors import InvariantError
from headwater.scheduler.batch import IntArray, ScheduledBatch, StepResult
from headwater.types import Tokens

log = logging.getLogger(__name__)

_RING = 3
"""Number of steps with separate pinned memory: one more than may be in flight."""

_MASK_GRACE_S = 0.005
"""Longest wait for masks: about the time of a decode step."""


class CudaRunner:
    """The engine's `Runner` on a GPU. Used by one thread, which may call `submit` and `collect`
    in any order."""

    depth = 2
    layerwise = True

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        shared: bool = False,
        masks: MaskWorkers | None = None,
    ) -> None:
        """Without `masks`, rows with a grammar cannot be run. Peers may map a `shared` pool."""
        if model.device.index is not None:  # events and kernels use this thread's device
            torch.cuda.set_device(model.device)
        self._model = model
        self._max_rows = min(max_num_seqs, max_batched_tokens)
        self._max_tokens = max_batched_tokens
        self.pool = open_pool(model, num_blocks, block_tokens, shared=shared)
        self.arrivals = Arrivals(model.num_layers)
        """The copier reports loads here; rows wait for the loads that they read."""
        self._chosen = torch.zeros(self._max_rows, dtype=torch.int32, device=model.device)
        self._host = torch.zeros((_RING, self._max_rows), dtype=torch.int32, pin_memory=True)
        self._staging = Staging(4 * max_batched_tokens + (1 << 16), num_buffers=_RING)
        self._sampler = Sampler(model.eos_token_ids)
        self._sampling = DeviceSampler(
            self._chosen, model.vocab_size, model.eos_token_ids, dtype=model.dtype
        )
        self._masks = masks
        with torch.inference_mode():
            fused = fused_decoder(model.module, model.max_model_len)
        self._decoder: FusedDecoder | ModuleDecoder = fused or ModuleDecoder(model)
        self.graphs: DecodeGraphs | None = None
        self._suffixes: SuffixGraphs | None = None
        if fused is not None:
            width = min(-(-model.max_model_len // block_tokens), num_blocks) + 1
            self.graphs = DecodeGraphs(
                fused, self.pool, self._chosen, max_rows=self._max_rows, max_table=width
            )
            self._suffixes = SuffixGraphs(
                fused, self.pool, self._chosen, self.graphs.logits, max_table=width
            )
        self.announce: Callable[[ScheduledBatch, Tokens], None] | None = None
        """Called with each step before it is computed, if other ranks compute it too."""
        self.announce_warm: Callable[[WarmPhase], None] | None = None
        """Called with each `WarmPhase` before the first step, if other ranks prepare, too."""
        self._group: RankGroup | None = None
        self.compilations: CompilationCounter | None = None
        """Counts compiled kernels, if they are counted."""
        self._submitted: deque[SubmittedStep] = deque()
        self._last: SubmittedStep | None = None
        self._num_steps = 0

    @property
    def is_fused(self) -> bool:
        """Whether the model runs in our fused decoder and in graphs."""
        return self.graphs is not None

    def connect(self, group: RankGroup) -> None:
        """Compute one rank's part with the collectives of `group`. Call it before `warm`."""
        self._group = group
        decoder = self._decoder
        connect(self._model.module, group)
        if group.all_agree(self.is_fused, self._model.device):
            assert isinstance(decoder, FusedDecoder), "graphs are of a fused decoder"
            decoder.connect(group)
        else:
            self._decoder = ModuleDecoder(self._model)
            self.graphs = self._suffixes = None
        if not group.can_capture:
            self.graphs = self._suffixes = None

    def warm(self, num_rows: int | None = None) -> None:
        """Capture the graphs for up to this many rows, by default all, and compile and load
        what prompts need."""
        if self.graphs is not None:
            with torch.inference_mode():
                self._sampling.capture(self.graphs.logits)
        if self.announce_warm is not None:
            self.announce_warm(WarmPhase.CAPTURE)
        self.capture(num_rows)
        if num_rows is None:
            self._run_warm_steps()

    def capture(self, num_rows: int | None = None) -> None:
        """Capture the model's graphs, on every rank at the same time."""
        decoder = self._decoder
        if self.graphs is None or not isinstance(decoder, FusedDecoder):
            return
        with torch.inference_mode():
            if num_rows is not None:
                self.graphs.warm_up_to(num_rows)
                return
            self.graphs.warm()
            if self._suffixes is not None:
                self._suffixes.warm()
            decoder.warm(self.pool.data)
            for variant in _distinct([layer.variant for layer in decoder.layers]):
                warm_chunks(self.pool, decoder.heads, variant)
        log.info("graphs are captured: sizes=%d", len(self.graphs.sizes))

    def clear(self) -> None:
        """Forget the warm-up steps. The pool must contain zeros, because a masked key is still
        multiplied by its zero weight, and zero times NaN is NaN."""
        self.pool.blocks.zero_()
        self._last = None

    def _run_warm_steps(self) -> None:
        """Compute a step of each kind. The pool must be empty."""
        if self._submitted or self._num_steps:
            raise InvariantError("warm-up steps must be computed before any other step")
        capacity = self.pool.num_blocks * self.pool.block_tokens
        limits = WarmLimits(
            max_rows=self._max_rows,
            max_tokens=self._max_tokens,
            max_context=min(self._model.max_model_len, capacity),
            block_tokens=self.pool.block_tokens,
        )
        num_steps = 0
        for batch in warm_steps(limits):
            self.submit(batch)
            self.collect()
            num_steps += 1
        if self.announce_warm is not None:
            self.announce_warm(WarmPhase.CLEAR)
        self.clear()
        log.info("kernels are compiled and loaded: steps=%d", num_steps)

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue one step; `collect` returns its result."""
        if self.announce is not None:
            self.announce(batch, batch.tokens)
        began = record_begin()
        first_masks = None
        if (batch.carry < 0).all():  # no mask awaits a token of the previous step
            first_masks = begin_masks(self._masks, batch, {})
        with torch.inference_mode():
            logits, places, scores = self.compute(batch)
            logprobs, masks = None, None
            carried = carried_tokens(batch, self._last)
            if len(places) and not self._sampling.is_plain(batch.params):
                pending = first_masks or begin_masks(self._masks, batch, carried)
                masks = _take(pending, batch)
                logprobs = self._choose(batch, logits, places, masks)
            self.share_chosen(places)
            self._finish_submit(
                SubmittedStep(
                    batch=batch,
                    places=places,
                    host=self._host[self._num_steps % _RING],
                    logprobs=logprobs,
                    masks=masks,
                    carried=carried,
                    scores=scores,
                    began=began,
                )
            )

    def compute(self, batch: ScheduledBatch) -> tuple[Tensor, IntArray, PromptScores | None]:
        """Queue the model's part of a step, with greedy sampling. Returns the logits, the index
        of each sampled row among the chosen tokens, and the scores of prompt tokens."""
        layout = Layout(batch, self.pool.block_tokens)
        carry = self._carry(batch)
        if self._suffixes is not None and self._suffixes.takes(layout):
            return self._suffixes.run(layout), batch.sampled.astype(np.int32), None
        if self.graphs is not None and self.graphs.takes(layout):
            logits = self.graphs.run(layout.graph_rows(carry))
            return logits, layout.last_tokens().astype(np.int32), None
        logits, scores = self._run_packed(layout, carry)
        places = np.arange(len(batch.sampled), dtype=np.int32)
        if len(places):
            choose_greedy(logits, self._chosen)
        return logits, places, scores

    def share_chosen(self, places: IntArray) -> None:
        """Send the tokens of rank 0 to every rank, because the next step may carry them."""
        if self._group is not None and len(places):
            self._group.copy_from_first(self._chosen)

    def collect(self) -> StepResult:
        """The result of the oldest step in flight; waits for it without a lock."""
        return self._submitted.popleft().result()

    def close(self) -> None:
        """Discard steps that were not collected, when the device has finished them."""
        for submitted in self._submitted:
            submitted.done.synchronize()
        self._submitted.clear()
        self._last = None
        if self._masks is not None:
            self._masks.close()

    def _run_packed(
        self, layout: Layout, carry: IntArray
    ) -> tuple[Tensor, PromptScores | None]:
        """Logits of the sampled rows of a step with prompt chunks, and the scores of its prompt
        tokens if they are requested."""
        decoder = self._decoder
        step: PackedStep = pack(
            layout,
            carry,
            pool=self.pool,
            staging=self._staging,
            heads=decoder.heads,
            min_torch_tokens=decoder.min_torch_tokens(self.pool.data),
        )
        if layout.batch.awaits:
            step.attention.gate = self._gate(layout.batch)
        batch, scored = layout.batch, None
        if batch.scored:
            scored = put(batch.scored_places().astype(np.int64), self.pool.device)
        if isinstance(decoder, ModuleDecoder):
            return self._run_module(decoder, step, batch, scored)
        hidden = decoder.embed(step.tokens, step.carry, self._chosen)
        attention = step.attention
        hidden = decoder.run(
            hidden,
            step.places,
            self.pool.data,
            attention.attend,
            # Scores need the last layer at every position, not only at the sampled ones.
            wanted=None
            if scored is not None
            else RowsToCompute(step.logits_at, attention.attend_sampled),
            expanded=step.expanded,
            is_eager=True,
        )
        project = decoder.logits if self.graphs is None else self.graphs.project
        if scored is None:
            return project(hidden), None
        whole, at = hidden, scored
        scores = PromptScores(
            batch,
            lambda start, end: decoder.logits(whole.index_select(0, at[start:end])),
        )
        hidden = whole.index_select(0, step.logits_at)
        return project(hidden), scores

    def _run_module(
        self,
        decoder: ModuleDecoder,
        step: PackedStep,
        batch: ScheduledBatch,
        scored: Tensor | None,
    ) -> tuple[Tensor, PromptScores | None]:
        if scored is None:
            return decoder.logits(step, self._chosen), None
        count = len(step.logits_at)
        step.logits_at = torch.cat((step.logits_at, scored.int()))
        logits = decoder.logits(step, self._chosen)
        places = logits[count:]
        return logits[:count], PromptScores(batch, lambda start, end: places[start:end])

    def _gate(self, batch: ScheduledBatch) -> Callable[[int], None]:
        """Makes each layer wait for the loads that rows of `batch` read."""
        arrivals = self.arrivals.of(set(batch.awaits.values()))
        stream = torch.cuda.current_stream(self.pool.device)

        def gate(layer: int) -> None:
            for arrival in arrivals:
                arrival.order(layer, stream)

        return gate

    def _choose(
        self,
        batch: ScheduledBatch,
        logits: Tensor,
        places: IntArray,
        masks: StepMasks | None,
    ) -> PendingLogprobs | LogprobTable:
        """Choose the tokens of the sampled rows from the rows `places` of `logits`, and write
        them to the same places of the chosen tokens. Greedy tokens are already written."""
        if self._sampling.takes(batch.params):
            return self._sampling.run(batch, logits, places, masks, self._last_token)
        # More than the kernels support: torch sorts, and waits for the previous step if a row
        # has penalties.
        at = put(places, logits.device)
        logits = logits.index_select(0, at)
        chosen = self._sampler.pick(logits, sampled_rows(batch, masks, self._last_token))
        self._chosen[at] = chosen.int()
        return LogprobTable(logits, chosen, [p.logprobs for p in batch.params])

    def _last_token(self, row: int) -> Tokens:
        """The token that the previous step sampled for one of its rows; waits for it."""
        if self._last is None:
            raise InvariantError("a first batch has nothing to carry")
        at = np.flatnonzero(self._last.batch.sampled == row)
        return self._last.tokens()[at].astype(np.int32)

    def _finish_submit(self, submitted: SubmittedStep) -> None:
        """Queue the copy of the sampled tokens to the host, and record the step."""
        copy_ints(self._chosen[: int(submitted.places.max(initial=0)) + 1], submitted.host)
        submitted.done.record()
        self._num_steps += 1
        self._submitted.append(submitted)
        self._last = submitted

    def _carry(self, batch: ScheduledBatch) -> IntArray:
        """Per row: index of the awaited token among the chosen ones; -1 if it awaits none."""
        carry = np.full(batch.num_rows, -1, dtype=np.int32)
        rows = np.flatnonzero(batch.carry >= 0)
        if len(rows) == 0:
            return carry
        if self._last is None:
            raise InvariantError("a first batch has nothing to carry")
        before = self._last
        place = np.full(before.batch.num_rows, -1, dtype=np.int32)
        place[before.batch.sampled] = before.places
        carry[rows] = place[batch.carry[rows]]
        if (carry[rows] < 0).any():
            raise InvariantError("a carry names a row that chose no token")
        return carry


def _take(pending: PendingMasks | None, batch: ScheduledBatch) -> StepMasks | None:
    """The masks of the rows with a grammar. Threads make them while the device computes this
    step, which is already queued; so waiting here delays no other row."""
    if pending is None:
        return None
    return pending.take(is_alone=is_masked(batch), grace_s=_MASK_GRACE_S)


def _distinct(variants: list[Variant]) -> list[Variant]:
    """One variant of each kind for which a separate kernel is compiled."""
    kinds = {
        (v.window is not None, v.softcap is not None, v.sinks is not None): v for v in variants
    }
    return list(kinds.values())
