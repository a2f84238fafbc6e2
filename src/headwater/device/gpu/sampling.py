"""Sampling on the device: the parameters of a step's rows are sent there, and tokens stay
there.

The kernels are captured in a separate graph, which is replayed after the forward pass. The
parameters are packed into pinned memory and sent by one kernel. A step with only greedy rows
sends nothing, because the forward pass has already chosen the most likely tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headwater.device.counter_random import uniform_of
from headwater.device.gpu.mask_buffer import MaskBuffer
from headwater.device.gpu.penalty_counts import PenaltyCounts
from headwater.device.gpu.sampling_table import EditList, SamplingTable
from headwater.device.gpu.staging import Staging
from headwater.device.kernels.ints import copy_ints
from headwater.device.kernels.logit_edits import EDITED, RANDOM, SamplingInputs
from headwater.device.kernels.logprobs import MAX_TOP, LogprobBuffers, find_logprobs
from headwater.device.kernels.sampling import SamplingScratch, choose_sampled
from headwater.device.kv import Ints
from headwater.engine.masks import StepMasks
from headwater.scheduler.batch import IntArray, ScheduledBatch
from headwater.scheduler.request import SamplingParams, TokenLogprobs
from headwater.types import Tokens

_RING = 3
"""Number of steps with separate pinned memory: one more than may be in flight."""

_MAX_EDITS = 1 << 14
"""Maximum number of listed edits of a step. Steps with more are sampled by torch, which is
slower."""

_ROW_INTS = ("flags", "top_k", "state", "edit_start", "edit_end", "mask", "num_top")
_ROW_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "uniform",
    "repetition",
    "presence",
    "frequency",
)
_TABLE_FLOATS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}


def graph_rows(max_rows: int) -> list[int]:
    """Numbers of rows that get graphs, ascending: powers of two, and the maximum."""
    sizes = (1 << power for power in range(4, max_rows.bit_length()))
    return [*(size for size in sizes if size < max_rows), max_rows]


class PendingLogprobs:
    """Log-probabilities of a step that are being copied from the device."""

    def __init__(self, host: Tensor, places: IntArray, num_top: Ints) -> None:
        self._host, self._places, self._num_top = host, places, num_top

    def read(self) -> list[TokenLogprobs | None]:
        """The log-probabilities of each sampled row; None for a row that did not request them.
        The device must have finished."""
        ints = self._host.numpy()
        floats = ints.view(np.float32)
        found: list[TokenLogprobs | None] = [None] * len(self._places)
        for i in np.flatnonzero(self._num_top >= 0).tolist():
            row, count = int(self._places[i]), int(self._num_top[i])
            found[i] = TokenLogprobs(
                chosen=float(floats[row, 0]),
                rank=int(ints[row, 1]),
                top_ids=tuple(ints[row, 2 + MAX_TOP : 2 + MAX_TOP + count].tolist()),
                top_values=tuple(floats[row, 2 : 2 + count].tolist()),
            )
        return found


class DeviceSampler:
    """Samples the tokens of steps with at most `max_rows` rows into `chosen`."""

    def __init__(
        self, chosen: Tensor, vocab: int, eos_token_ids: Sequence[int], *, dtype: torch.dtype
    ) -> None:
        self._max_rows, device = len(chosen), chosen.device
        self._chosen = chosen
        self._eos_token_ids = tuple(eos_token_ids)
        self._table = SamplingTable(4 * self._max_rows + 64)
        self._counts = PenaltyCounts(self._max_rows, vocab, device)
        self._scratch = SamplingScratch(self._max_rows, vocab, device)
        names = (*_ROW_INTS, *_ROW_FLOATS)
        self._stride = -(-self._max_rows // 16) * 16
        self._start = {name: at * self._stride for at, name in enumerate(names)}
        self._edits_at = len(names) * self._stride
        self._sent = torch.zeros(
            self._edits_at + 2 * _MAX_EDITS, dtype=torch.int32, device=device
        )
        self._staging = Staging(len(self._sent), num_buffers=_RING)
        self._masks = MaskBuffer(self._max_rows, vocab, device, num_buffers=_RING)
        self._logprobs = LogprobBuffers(self._max_rows, device)
        self._host = torch.zeros(
            (_RING, *self._logprobs.out.shape), dtype=torch.int32, pin_memory=True
        )
        self._num_steps = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        """Graphs by the number of rows: a graph for more rows would launch programs for unused
        ones too."""
        self._captured: Tensor | None = None
        self._compile(torch.zeros((1, vocab), dtype=dtype, device=device))

    def is_plain(self, params: Sequence[SamplingParams]) -> bool:
        """Whether all rows are greedy without further parameters."""
        return bool(self._table.is_plain[self._table.entries(params)].all())

    def takes(self, params: Sequence[SamplingParams]) -> bool:
        """Whether the kernels support the parameters of these rows."""
        entries = self._table.entries(params)
        if int(self._table.num_logprobs[entries].max(initial=-1)) > MAX_TOP:
            return False
        num_edits = int(self._table.num_edits[entries].sum())
        return num_edits + len(params) * len(self._eos_token_ids) <= _MAX_EDITS

    def capture(self, logits: Tensor) -> None:
        """Capture the kernels over `logits`, `[max_rows, vocab]`, whose address is fixed."""
        if self._graphs:
            return
        self._sent.zero_()
        self._section("num_top").fill_(-1)
        for num_rows in graph_rows(self._max_rows):
            graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            calls = self._choose, self._find_logprobs
            for graph, call in zip(graphs, calls, strict=True):
                call(logits[:num_rows], num_rows)
                torch.cuda.synchronize(logits.device)
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    call(logits[:num_rows], num_rows)
            self._graphs[num_rows] = graphs
        self._captured = logits

    def run(
        self,
        batch: ScheduledBatch,
        logits: Tensor,
        places: IntArray,
        masks: StepMasks | None,
        last_tokens: Callable[[int], Tokens],
    ) -> PendingLogprobs:
        """Sample tokens of the sampled rows; row `places[i]` of `logits` is the i-th of them.

        `masks` are those of rows with a grammar, by position among the sampled rows.
        `last_tokens` waits for the previous step and returns the token that it sampled for a
        row; it is needed only if the counts of a penalised row must be filled.
        """
        entries = self._table.entries(batch.params)
        num_top = self._table.num_logprobs[entries]
        mask = self._masks.send(masks, len(places))
        self._send(batch, entries, places, mask, last_tokens)
        num_rows = len(logits)
        is_captured = self._captured is not None and (
            logits.data_ptr() == self._captured.data_ptr()
        )
        graphs = None
        if is_captured:
            graphs = self._graphs[next(size for size in self._graphs if size >= num_rows)]
            graphs[0].replay()
        else:
            self._choose(logits, num_rows)
        self._masks.mark_read()
        host = self._host[self._num_steps % _RING]
        self._num_steps += 1
        pending = PendingLogprobs(host, places, num_top)
        if int(num_top.max(initial=-1)) < 0:
            return pending
        if graphs is not None:
            graphs[1].replay()
        else:
            self._find_logprobs(logits, num_rows)
        copy_ints(self._logprobs.out[:num_rows].view(-1), host.view(-1))
        return pending

    def _send(
        self,
        batch: ScheduledBatch,
        entries: Ints,
        places: IntArray,
        mask: Ints,
        last_tokens: Callable[[int], Tokens],
    ) -> None:
        table = self._table
        positions = batch.context_lens[batch.sampled].astype(np.int64)
        states = self._states(batch, table.is_penalised[entries], last_tokens)
        starts, ends, edits = self._edits(batch, entries, positions)
        flags = np.where(table.is_random[entries], RANDOM, 0)
        flags |= np.where((states >= 0) | (ends > starts) | (mask >= 0), EDITED, 0)
        pinned, ints = self._staging.take(len(self._sent))
        floats = ints.view(np.float32)
        ints[: self._stride] = 0  # flags of unused rows
        at = self._start["num_top"]
        ints[at : at + self._stride] = -1
        for name, values in (
            ("flags", flags),
            ("top_k", table.ints["top_k"][entries]),
            ("state", states),
            ("edit_start", starts),
            ("edit_end", ends),
            ("mask", mask),
            ("num_top", table.num_logprobs[entries]),
        ):
            ints[self._start[name] + places] = values
        for name, column in _TABLE_FLOATS.items():
            floats[self._start[name] + places] = table.floats[column][entries]
        floats[self._start["uniform"] + places] = uniform_of(table.seeds[entries], positions)
        num_edits, amounts_at = len(edits.ids), self._edits_at + _MAX_EDITS
        ints[self._edits_at : self._edits_at + num_edits] = edits.ids
        copy_ints(pinned[: self._edits_at + num_edits], self._sent)
        if num_edits:
            floats[amounts_at : amounts_at + num_edits] = edits.amounts
            amounts = pinned[amounts_at : amounts_at + num_edits]
            copy_ints(amounts, self._sent[amounts_at:])

    def _states(
        self,
        batch: ScheduledBatch,
        is_penalised: np.ndarray[tuple[int], np.dtype[np.bool_]],
        last_tokens: Callable[[int], Tokens],
    ) -> Ints:
        """Per sampled row: the row of its counts, or -1 without penalties."""
        states = np.full(len(batch.sampled), -1, dtype=np.int64)
        for i in np.flatnonzero(is_penalised).tolist():
            tokens, num_prompt = batch.histories[i]
            row = int(batch.sampled[i])
            name, source = batch.request_ids[row], int(batch.carry[row])
            num_tokens = len(tokens) + (source >= 0)
            if self._counts.follows(
                name, step=batch.step, num_tokens=num_tokens, num_prompt=num_prompt
            ):
                states[i] = self._counts.advance(name, step=batch.step)
                continue
            if source >= 0:
                tokens = np.append(tokens, last_tokens(source))
            states[i] = self._counts.fill(name, tokens, num_prompt, step=batch.step)
        return states

    def _edits(
        self, batch: ScheduledBatch, entries: Ints, positions: Ints
    ) -> tuple[Ints, Ints, EditList]:
        """Per sampled row: the range of its listed edits; and the list of all edits."""
        table = self._table
        starts = np.zeros(len(entries), dtype=np.int64)
        min_tokens = table.ints["min_tokens"][entries]
        forbids = min_tokens > 0
        for i in np.flatnonzero(forbids).tolist():
            forbids[i] = int(positions[i]) - batch.histories[i][1] < min_tokens[i]
        ends = starts.copy()
        lists: list[EditList] = []
        end = 0
        for i in np.flatnonzero(forbids | table.has_bias[entries]).tolist():
            found = table.edit_list(
                int(entries[i]), self._eos_token_ids, forbids_ends=bool(forbids[i])
            )
            starts[i], ends[i] = end, end + len(found.ids)
            end += len(found.ids)
            lists.append(found)
        if not lists:
            return starts, ends, EditList(np.zeros(0, np.int32), np.zeros(0, np.float32))
        ids = np.concatenate([found.ids for found in lists])
        return starts, ends, EditList(ids, np.concatenate([found.amounts for found in lists]))

    def _compile(self, logits: Tensor) -> None:
        """Compile and load the kernels by running them on one row without parameters."""
        self._section("num_top").fill_(-1)
        self._choose(logits, 1)
        self._find_logprobs(logits, 1)

    def _choose(self, logits: Tensor, num_rows: int) -> None:
        choose_sampled(logits, self._chosen, self._inputs(), self._scratch, num_rows)

    def _find_logprobs(self, logits: Tensor, num_rows: int) -> None:
        find_logprobs(logits, self._chosen, self._section("num_top"), self._logprobs, num_rows)

    def _inputs(self) -> SamplingInputs:
        ints = {name: self._section(name) for name in _ROW_INTS if name != "num_top"}
        floats = {name: self._section(name).view(torch.float32) for name in _ROW_FLOATS}
        amounts_at = self._edits_at + _MAX_EDITS
        return SamplingInputs(
            **ints,
            **floats,
            edit_ids=self._sent[self._edits_at : amounts_at],
            edit_amounts=self._sent[amounts_at:].view(torch.float32),
            masks=self._masks.words,
            counts=self._counts.data,
        )

    def _section(self, name: str) -> Tensor:
        start = self._start[name]
        return self._sent[start : start + self._max_rows]
