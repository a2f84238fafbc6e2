"""A slot is written by a load only when no step in flight can still write to it."""

import pytest
import torch

from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.bench._gpu_engine import GpuEngine  # noqa: E402 - it imports Triton
from headwater.device.model import LoadedModel  # noqa: E402
from headwater.scheduler.batch import ScheduledBatch  # noqa: E402
from headwater.scheduler.results import ResultApplier  # noqa: E402
from headwater.scheduler.sequence import Sequence  # noqa: E402
from headwater.types import RequestId, Slots  # noqa: E402
from tests.device.test_gpu_layerwise import BLOCKS, model  # noqa: E402

__all__ = ["model", "pytestmark"]

LATE_CYCLES = 200_000_000
"""A tenth of a second or so: long enough that the load ends before the step that it
overtakes begins."""


class Tables:
    """Records where the tokens of each request are, from the submitted batches."""

    def __init__(self, engine: GpuEngine) -> None:
        self.last: dict[RequestId, Slots] = {}
        self._submit = engine.runner.submit
        engine.runner.submit = self._note  # type: ignore[method-assign]

    def _note(self, batch: ScheduledBatch) -> None:
        for name, table in zip(batch.request_ids, batch.block_tables, strict=True):
            self.last[name] = table.copy()
        self._submit(batch)


def load_into_reused_slots(model: LoadedModel, turns: int) -> int:
    """Loads blocks into slots of aborted requests while steps with those are in flight; returns
    in how many turns a loaded block changed."""
    engine = GpuEngine(
        model, num_blocks=BLOCKS + 16, host_blocks=BLOCKS * 4, max_num_seqs=8,
        max_batched_tokens=1024, load_policy="wait",
    )  # fmt: skip
    tables, num_full, wrong = Tables(engine), BLOCKS - 1, 0
    for turn in range(turns):
        prompt = engine.prompt(BLOCKS * 64 - 10, seed=turn)
        first = engine.add(prompt, 2)
        finish(engine, first)
        engine.drain()
        pool = engine.runner.pool.data
        before = pool[torch.from_numpy(tables.last[first][:num_full].astype(int)).cuda()]
        engine.clear_device()
        others = [engine.add(engine.prompt(330, seed=900 + turn * 3 + i), 50) for i in range(3)]
        for _ in range(6):
            engine.core.step()
        torch.cuda._sleep(LATE_CYCLES)
        engine.core.step()
        for other in others:
            engine.core.abort(other)
        again = engine.add(prompt, 2)
        finish(engine, again)
        after = pool[torch.from_numpy(tables.last[again][:num_full].astype(int)).cuda()]
        wrong += not torch.equal(before, after)
        engine.drain()
        engine.clear_device()
    engine.close()
    return wrong


def finish(engine: GpuEngine, name: RequestId) -> None:
    """Turn the loop until this request has ended."""
    ended = False
    while not ended:
        engine.core.wait()
        for output in engine.core.step():
            ended |= output.request_id == name and output.finish_reason is not None


def test_loaded_blocks_stay_what_they_are(model: LoadedModel) -> None:
    """Lesson 21: the last step of an aborted request writes only to its own slots."""
    assert load_into_reused_slots(model, turns=3) == 0


def test_without_the_order_of_freeing_a_step_overwrites_loaded_blocks(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If slots are freed while a step uses them, loaded blocks change: the test above detects
    this."""
    finish_later = ResultApplier.finish

    def finish_now(self: ResultApplier, sequence: Sequence, reason: str, now: float) -> None:
        finish_later(self, sequence, reason, now)
        self._blocks.release(sequence, now)

    monkeypatch.setattr(ResultApplier, "finish", finish_now)

    assert load_into_reused_slots(model, turns=3) > 0
