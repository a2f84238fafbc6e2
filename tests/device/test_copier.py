"""The CPU copier: whole blocks, both directions, exact bytes, while a loop runs."""

import threading
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from headwater.cache import JobStatus, LoadJob, OffloadJob
from headwater.clock import SystemClock, VirtualClock
from headwater.device.copier import CpuCopier
from headwater.device.kv import KVPool
from headwater.launch.host_memory import HostMemory
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import Mover
from headwater.transfer.slab import HostSlab
from headwater.types import JobId, Tier
from tests.device.pool_shape import PoolShape
from tests.interpreter import holds_interpreter


class CopierHarness:
    def __init__(self, dtype: torch.dtype) -> None:
        model: Any = PoolShape(2, 2, 8, dtype=dtype, device=torch.device("cpu"))
        self.pool = KVPool(model, num_blocks=12, block_tokens=4)
        self.slab = HostSlab(20, self.pool.num_bytes // 12)
        self.mover = Mover(CpuCopier(self.pool, self.slab, SystemClock()))

    def copy(self, kind: Any, sources: list[int], targets: list[int]) -> None:
        up = kind is LoadJob
        plan = kind(
            job=JobId(1),
            source=Tier.HOST if up else Tier.DEVICE,
            target=Tier.DEVICE if up else Tier.HOST,
            source_slots=np.array(sources),
            target_slots=np.array(targets),
        )
        self.mover.start([plan], now=0.0)
        while not (outcomes := self.mover.take(now=0.0)):
            self.mover.completions.wait(10)
        assert [outcome.status for outcome in outcomes] == [JobStatus.DONE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_as_they_were(dtype):
    """Lesson 22: each block arrives in the slot that the plan names, in any order of slots;
    nothing else changes."""
    harness = CopierHarness(dtype)
    harness.pool.data.copy_(torch.randn(harness.pool.data.shape).to(dtype))
    before = harness.pool.data.clone()
    sources, on_host, back = [3, 4, 5, 9, 0], [7, 8, 9, 2, 15], [10, 11, 1, 2, 6]

    harness.copy(OffloadJob, sources, on_host)
    harness.copy(LoadJob, on_host, back)
    harness.mover.close()

    for source, target in zip(sources, back, strict=True):
        assert torch.equal(harness.pool.data[target], before[source])
    rest = [slot for slot in range(12) if slot not in back]
    assert torch.equal(harness.pool.data[rest], before[rest])


def test_no_thread_outlives_a_closed_copier():
    """A thread that frees the pool while the interpreter ends would abort the process."""
    before = set(threading.enumerate())
    harness = CopierHarness(torch.float32)

    harness.copy(OffloadJob, [5], [3])
    harness.mover.close()

    assert set(threading.enumerate()) <= before


def test_a_load_marks_the_slots_it_writes():
    """Lesson 21: copies of a slot's old KV elsewhere (buffers) are stale from then on."""
    harness = CopierHarness(torch.float32)
    before = harness.pool.writes.copy()

    harness.copy(LoadJob, [0, 1], [4, 6])
    harness.copy(OffloadJob, [4, 6], [0, 1])
    harness.mover.close()

    assert np.flatnonzero(harness.pool.writes - before).tolist() == [4, 6]


def test_the_host_has_the_same_bytes_in_the_same_order():
    """One copy moves one block: no tier repacks anything."""
    harness = CopierHarness(torch.float32)
    harness.pool.data.copy_(torch.randn(harness.pool.data.shape))

    harness.copy(OffloadJob, [5], [3])
    harness.mover.close()

    assert bytes(harness.slab.view(3)) == harness.pool.data[5].numpy().tobytes()


def test_a_copy_releases_the_gil():
    """Lesson 13: the loop continues while a whole block is copied."""
    model: Any = PoolShape(2, 2, 8, dtype=torch.float32, device=torch.device("cpu"))
    model.num_layers, model.head_dim = 64, 1024
    pool = KVPool(model, num_blocks=1, block_tokens=64)
    slab = HostSlab(1, pool.num_bytes)
    copier = CpuCopier(pool, slab, SystemClock())
    slots = np.array([0])
    up = LoadJob(
        job=JobId(1),
        source=Tier.HOST,
        target=Tier.DEVICE,
        source_slots=slots,
        target_slots=slots,
    )

    assert not holds_interpreter(lambda: copier._copy(up))
    copier.close()


def test_pages_are_made_for_the_host_tier_only():
    """The pages of the host tier are allocated before blocks are written to them; staging
    buffers of links are small and get their pages when they are used."""
    model: Any = PoolShape(2, 2, 8, dtype=torch.float32, device=torch.device("cpu"))
    pool = KVPool(model, num_blocks=1, block_tokens=4)
    runner: Any = None  # copies on a CPU do not need it
    memory = HostMemory(pool, runner, SystemClock())
    slab = HostSlab(1, pool.num_bytes)

    tier = memory.open_copier(slab)
    links = memory.open_copier(slab, for_links=True)
    tier.close()
    links.close()

    assert isinstance(tier, CpuCopier)
    assert isinstance(links, CpuCopier)
    assert tier.pages is not None
    assert links.pages is None


class SlowMachine:
    """A clock by which every copy takes a second."""

    def __init__(self) -> None:
        self._seconds = count()

    def now(self) -> float:
        return float(next(self._seconds))


@pytest.mark.parametrize(
    ("clock", "num_arrived"), [(VirtualClock(), [4, 4, 4, 4]), (SlowMachine(), [1, 2, 3, 4])]
)
def test_short_copies_are_reported_together(clock, num_arrived):
    """The loop does not start a step with the first of several sequences whose short loads were
    started together; a long copy delays no report of an earlier one."""
    model: Any = PoolShape(2, 2, 8, dtype=torch.float32, device=torch.device("cpu"))
    pool = KVPool(model, num_blocks=5, block_tokens=4)
    slab = HostSlab(5, pool.num_bytes // 5)
    slab.rows[:] = 7
    copier = CpuCopier(pool, slab, clock)
    is_busy, may_go_on = threading.Event(), threading.Event()
    arrived: list[int] = []

    def block(completion: JobCompletion) -> None:
        is_busy.set()
        may_go_on.wait(10)

    def report(completion: JobCompletion) -> None:
        arrived.append(int((pool.blocks[1:] == 7).all(dim=1).sum()))

    copier.start(_load(0), block)
    assert is_busy.wait(10)
    for slot in range(1, 5):
        copier.start(_load(slot), report)
    may_go_on.set()
    copier.close()

    assert arrived == num_arrived


def _load(slot: int) -> LoadJob:
    slots = np.array([slot])
    return LoadJob(JobId(slot), Tier.HOST, Tier.DEVICE, slots, slots)
