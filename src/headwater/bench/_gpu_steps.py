"""Single steps of a runner on the GPU, without a scheduler: any number of rows of any length.

The KV that rows read is synthetic, so that a long context needs no prompt.
"""

from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.bench._gpu_engine import BLOCK_TOKENS
from headwater.device.gpu.inputs import Layout, pack
from headwater.device.gpu.runner import CudaRunner
from headwater.device.model import LoadedModel
from headwater.scheduler.batch import IntArray, ScheduledBatch
from headwater.scheduler.request import SamplingParams
from headwater.types import RequestId, Slots

_STEPS, _SKIPPED = 24, 6
_MOST_CODE = 120
"""Random bytes below this are finite values in e4m3, and small exponents in a block's
scales."""


def make_runner(model: LoadedModel, *, rows: int, tokens: int) -> CudaRunner:
    """A runner with room for this many rows and tokens of synthetic KV in total."""
    runner = CudaRunner(
        model,
        num_blocks=tokens // BLOCK_TOKENS + 2 * rows,
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=rows,
        max_batched_tokens=8192,
    )
    if model.has_fp8_kv:
        runner.pool.blocks.random_(0, _MOST_CODE)
    else:
        runner.pool.data.normal_()
    return runner


def check_positions(runner: CudaRunner, num_tokens: int) -> None:
    """Raise ValueError if the model has fewer positions. A scheduler would refuse such a row; the
    kernels read their rotary tables by position and do not check it."""
    limit = runner._model.max_model_len
    if num_tokens > limit:
        raise ValueError(
            f"a row of {num_tokens} tokens needs more positions than the model's {limit}; "
            "measure a shorter context or a shape with more positions"
        )


def decode_ms(runner: CudaRunner, rows: int, context: int) -> float:
    """Median time of a decode step of this many rows, each with its own context."""
    check_positions(runner, context + _STEPS - 1)
    runner.warm(rows)
    blocks = -(-(context + _STEPS) // BLOCK_TOKENS)
    tables = np.arange(rows * blocks, dtype=np.int64).reshape(rows, blocks)
    marks = []
    for step in range(_STEPS):
        at = np.full(rows, context - 1 + step, dtype=np.int32)
        carry = np.arange(rows, dtype=np.int32) if step else np.full(rows, -1, dtype=np.int32)
        runner.submit(_batch(step, [[1]] * rows, at, tables, carry))
        marks.append(_mark())
        if step:
            runner.collect()
    runner.collect()
    pairs = zip(marks[_SKIPPED:-1], marks[_SKIPPED + 1 :], strict=True)
    return median(float(before.elapsed_time(after)) for before, after in pairs)


def prefill_ms(runner: CudaRunner, length: int) -> float:
    """Median time of an uncached prompt in one step."""
    check_positions(runner, length)
    tokens = (np.arange(length, dtype=np.int32) * 7919 % 32000).tolist()
    tables = np.arange(-(-length // BLOCK_TOKENS), dtype=np.int64)[None]
    taken = []
    for step in range(5):
        begun = _mark()
        runner.submit(
            _batch(step, [tokens], np.zeros(1, np.int32), tables, np.full(1, -1, np.int32))
        )
        ended = _mark()
        runner.collect()
        taken.append(float(begun.elapsed_time(ended)))
    return median(taken[1:])


def all_logits(runner: CudaRunner, tokens: list[int]) -> Tensor:
    """Logits after every token of a prompt, `[tokens, vocabulary]`."""
    check_positions(runner, len(tokens))
    tables = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int64)[None]
    batch = _batch(0, [tokens], np.zeros(1, np.int32), tables, np.full(1, -1, np.int32))
    decoder: Any = runner._decoder
    with torch.inference_mode():
        step = pack(
            Layout(batch, BLOCK_TOKENS),
            np.full(1, -1, dtype=np.int32),
            pool=runner.pool,
            staging=runner._staging,
            heads=decoder.heads,
            min_torch_tokens=None,
        )
        hidden = decoder.embed(step.tokens, step.carry, runner._chosen)
        hidden = decoder.run(
            hidden, step.places, runner.pool.data, step.attention.attend, is_eager=True
        )
        logits: Tensor = decoder.logits(hidden)
    return logits


def _mark() -> torch.cuda.Event:
    """An event that the device records after all work that is queued now."""
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    mark.record()
    return mark


def _batch(
    step: int,
    rows: list[list[int]],
    start: IntArray,
    tables: Slots,
    carry: IntArray,
) -> ScheduledBatch:
    counts = [len(row) for row in rows]
    positions = [np.arange(n, dtype=np.int32) + s for n, s in zip(counts, start, strict=True)]
    return ScheduledBatch(
        step=step,
        request_ids=[RequestId(str(row)) for row in range(len(rows))],
        tokens=np.array([token for row in rows for token in row], dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.asarray(start + counts, dtype=np.int32),
        block_tables=list(tables),
        sampled=np.arange(len(rows), dtype=np.int32),
        params=[SamplingParams(temperature=0.0)] * len(rows),
        histories=[(np.array(row, dtype=np.int32), len(row)) for row in rows],
        carry=np.asarray(carry, dtype=np.int32),
    )
