"""CudaCopier: exact bytes, after the model's own writes, from a slab that is being pinned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache import JobStatus, LoadJob, OffloadJob
from headwater.clock import SystemClock
from headwater.device.kv import KVPool
from headwater.storage.base import Opening
from headwater.storage.codec import BlockFormat
from headwater.storage.registry import open_storage
from headwater.transfer.mover import Mover
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import StorageWorkers
from headwater.types import BlockKey, JobId, Tier
from tests.device.gpu import pytestmark, require_gpu
from tests.device.pool_shape import shape_of_2_mib_blocks

require_gpu()

from headwater.device.gpu.copier import CudaCopier, runs  # noqa: E402

__all__ = ["pytestmark"]

NUM_BLOCKS = 48


class GpuCopierHarness:
    def __init__(self, folder: Path | None = None, *, host_slots: int = 64) -> None:
        model: Any = shape_of_2_mib_blocks()
        self.clock = clock = SystemClock()
        self.pool = KVPool(model, num_blocks=NUM_BLOCKS, block_tokens=64)
        self.slab = HostSlab(host_slots, self.pool.num_bytes // NUM_BLOCKS)
        workers = None
        if folder is not None:
            opening = Opening(
                format=BlockFormat(
                    fingerprint=BlockKey(bytes(32)), block_bytes=self.slab.block_bytes
                ),
                clock=clock,
                memory=self.slab.memory,
                environ={},
            )
            storage = open_storage("file", {"path": str(folder)}, opening)
            workers = StorageWorkers(storage, self.slab, clock)
        self.copier = CudaCopier(self.pool, self.slab, clock)
        self.mover = Mover(self.copier, workers)
        self._job = 0

    def start(self, kind: Any, sources: Any, targets: Any, tiers: tuple[Tier, Tier]) -> None:
        self._job += 1
        keys: dict[str, Any] = {}
        if Tier.STORAGE in tiers:
            numbers = targets if tiers[0] is Tier.STORAGE else sources
            keys["keys"] = tuple(BlockKey(bytes([n + 1] * 32)) for n in range(len(numbers)))
            keys["parent"] = BlockKey(bytes(32))
        plan = kind(
            job=JobId(self._job),
            source=tiers[0],
            target=tiers[1],
            source_slots=np.array(sources, dtype=np.int64),
            target_slots=np.array(targets, dtype=np.int64),
            **keys,
        )
        self.mover.start([plan], now=self.clock.now())

    def end(self, count: int = 1) -> None:
        """Wait for the outcomes of this many jobs."""
        while count:
            outcomes = self.mover.take(now=self.clock.now())
            assert all(outcome.status is JobStatus.DONE for outcome in outcomes)
            count -= len(outcomes)
            if count:
                self.mover.completions.wait(10)


DOWN, UP = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)


def test_a_block_survives_every_tier_bit_for_bit(tmp_path: Path) -> None:
    """Bytes are the same on the device, host, file, host and device again, including NaN
    payloads."""
    harness = GpuCopierHarness(tmp_path)
    harness.pool.data.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
    before = harness.pool.data.view(torch.int16).clone()
    device, host = [3, 4, 9, 0, 40, 17], [7, 8, 2, 15, 60, 33]

    harness.start(OffloadJob, device, host, DOWN)
    harness.end()
    harness.start(OffloadJob, host, [], (Tier.HOST, Tier.STORAGE))
    harness.end()
    harness.slab.rows[:] = 0
    other, back = [20, 21, 5, 6, 50, 51], [30, 1, 31, 2, 32, 41]
    harness.start(LoadJob, [], other, (Tier.STORAGE, Tier.HOST))
    harness.end()
    harness.start(LoadJob, other, back, UP)
    harness.end()
    harness.mover.close()

    now = harness.pool.data.view(torch.int16)
    for source, target in zip(device, back, strict=True):
        assert torch.equal(now[target], before[source])
    rest = [slot for slot in range(NUM_BLOCKS) if slot not in back]
    assert torch.equal(now[rest], before[rest])


@pytest.mark.parametrize("ordered", [True, False])
def test_an_offload_follows_the_write_it_copies(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lesson 21: a block that queued work writes is copied after that work. A copy that
    does not wait copies the old bytes: so this test detects a missing wait."""
    harness = GpuCopierHarness()
    if not ordered:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    stale = 0
    slots = list(range(8))
    harness.start(OffloadJob, slots, slots, DOWN)
    harness.end()
    for turn in range(1, 31):
        torch.cuda._sleep(2_000_000)  # a millisecond or so in front of the write
        harness.pool.data[:8] = float(turn)
        harness.start(OffloadJob, slots, slots, DOWN)
        harness.end()
        torch.cuda.synchronize()
        read = torch.from_numpy(harness.slab.rows[:8].copy()).view(torch.bfloat16)
        stale += int(not bool((read == float(turn)).all()))
    harness.mover.close()

    assert stale == 0 if ordered else stale > 0


def test_many_jobs_both_ways_beside_the_model() -> None:
    """Blocks go to the host and back while the device computes; every block is intact."""
    harness = GpuCopierHarness()
    harness.pool.data.normal_()
    before = harness.pool.data[:16].clone()
    noise = torch.randn(4096, 4096, device="cuda")
    at = list(range(16))
    for turn in range(12):
        hosts = [(turn * 5 + i) % 64 for i in range(16)]
        for _ in range(4):
            noise = torch.tanh(noise @ noise)
        for half in (slice(0, 8), slice(8, 16)):
            harness.start(OffloadJob, at[half], hosts[half], DOWN)
        harness.end(2)
        at = [16 + (turn % 2) * 16 + i for i in range(16)]
        for half in (slice(0, 8), slice(8, 16)):
            harness.start(LoadJob, hosts[half], at[half], UP)
        harness.end(2)
    harness.mover.close()

    assert torch.equal(harness.pool.data[at], before)


def test_neighbours_are_one_copy_within_a_piece() -> None:
    """A run is slots that are adjacent on both sides; it ends before a gap on either side, and
    where another piece begins."""
    host, device = np.array([3, 4, 5, 6, 9, 8]), np.array([0, 1, 2, 7, 8, 9])

    starts, counts = runs(host, device, host // 5)

    assert starts.tolist() == [0, 2, 3, 4, 5]
    assert counts.tolist() == [2, 1, 1, 1, 1]


def test_copies_begin_before_the_slab_is_pinned() -> None:
    """In a slab of several pieces, the last slot is needed first and is pinned at once."""
    harness = GpuCopierHarness(host_slots=1024)
    harness.pool.data.normal_()

    harness.start(OffloadJob, [1, 2], [1023, 0], DOWN)
    harness.end()

    read = torch.from_numpy(harness.slab.rows[1023].copy()).view(torch.bfloat16)
    assert torch.equal(read, harness.pool.data[1].flatten().cpu())
    harness.mover.close()
    harness.mover.close()
