"""Real rank processes for tests: started once, with one model after another."""

import socket
import tempfile
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import torch

from headwater.cache import JobStatus, LoadJob, OffloadJob, TransferJob
from headwater.clock import SystemClock
from headwater.device.model import LoadedModel, load
from headwater.device.open import open_copier
from headwater.device.parallel.channel import RankChannel, RankMessage
from headwater.device.parallel.copier import ParallelCopier, RankCopies
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import LoadModel, MeetRanks, OpenRunner
from headwater.device.parallel.ranks import Rank, Ranks
from headwater.device.parallel.runner import ParallelRunner
from headwater.device.parallel.sharding import connect
from headwater.device.parallel.share import RankShare
from headwater.device.runner import TorchRunner
from headwater.launch.ranks import RankChild
from headwater.scheduler.request import SamplingParams
from headwater.transfer.completions import JobCompletion
from headwater.transfer.slab import HostSlab
from headwater.types import JobId, Tier
from tests.device.driver import Driver
from tests.device.families import prompt

_WAIT_S = 120.0


class RankHarness:
    """Rank processes: the test process is rank 0; the others are its children."""

    def __init__(self, size: int, *, device: str = "cpu") -> None:
        """All ranks on one device."""
        self._share = RankShare(rank=0, size=size)
        self._device = device
        self.children: list[RankChild] = []
        ranks = []
        for number in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                self.children.append(RankChild(number, theirs.fileno()))
            channel = RankChannel(ours, send_timeout_s=_WAIT_S)
            ranks.append(Rank(number=number, channel=channel, process=self.children[-1]))
        self.ranks = Ranks(ranks, SystemClock())
        self._folder = tempfile.TemporaryDirectory()
        self._group: RankGroup | None = None

    def load(self, folder: Path, *, dtype: str = "auto") -> LoadedModel:
        """Every rank's part of a model."""
        size = self._share.size
        self.ranks.tell_each(
            RankMessage.LOAD,
            [
                msgspec.json.encode(
                    LoadModel(
                        model=str(folder),
                        dtype=dtype,
                        device=self._device,
                        rank=rank,
                        size=size,
                    )
                )
                for rank in range(1, size)
            ],
        )
        model = load(folder, dtype=dtype, device=self._device, share=self._share)
        self.ranks.hear(RankMessage.LOADED, timeout_s=_WAIT_S)
        if self._group is None:
            told = MeetRanks(store=f"{self._folder.name}/meet", backend="gloo")
            self.ranks.tell(RankMessage.MEET, msgspec.json.encode(told))
            self._group = RankGroup(self._share, backend="gloo", store=Path(told.store))
        return model

    def runner(self, model: LoadedModel, **sizes: Any) -> ParallelRunner:
        """A runner over all ranks, in the form of a runner class for the tests' `Driver`."""
        assert self._group is not None
        own = {name: sizes.pop(name) for name in ("depth",) if name in sizes}
        told = OpenRunner(**sizes, min_rows=model.min_rows)
        self.ranks.tell(RankMessage.OPEN, msgspec.json.encode(told))
        runner: Any
        if self._device == "cpu":
            connect(model.module, self._group)
            runner = TorchRunner(model, **sizes, **own)
        else:
            from headwater.device.gpu.runner import CudaRunner

            runner = CudaRunner(model, **sizes)
            runner.connect(self._group)
        self.ranks.hear(RankMessage.READY, timeout_s=_WAIT_S)
        self._own = runner
        self._slab: HostSlab | None = None
        return ParallelRunner(runner, self.ranks, self._group)

    def copy_out(self, num_blocks: int) -> torch.Tensor:
        """The bytes of whole blocks, after every rank has copied its part to a slab."""
        slab, copier = self._open_copier(num_blocks)
        slab.rows[:] = 0
        self._copy(copier, OffloadJob, num_blocks)
        return torch.from_numpy(slab.rows.copy())

    def copy_in(self, num_blocks: int) -> None:
        """Copy the slab that `copy_out` has filled back to every rank."""
        self._copy(self._open_copier(num_blocks)[1], LoadJob, num_blocks)

    def clear(self) -> None:
        """Forget all KV on this rank."""
        self._own.pool.blocks.zero_()

    def _open_copier(self, num_blocks: int) -> tuple[HostSlab, ParallelCopier]:
        if self._slab is None:
            pool, copies = self._own.pool, RankCopies(self.ranks)
            self._slab = HostSlab(num_blocks, pool.block_bytes, for_ranks=True)
            own = open_copier(pool, self._slab, SystemClock())
            self._copier = copies.open(own, self._slab)
        return self._slab, self._copier

    def _copy(self, copier: ParallelCopier, kind: type[TransferJob], num_blocks: int) -> None:
        slots = np.arange(num_blocks)
        is_load = kind is LoadJob
        ended: SimpleQueue[JobCompletion] = SimpleQueue()
        job = kind(
            job=JobId(1),
            source=Tier.HOST if is_load else Tier.DEVICE,
            target=Tier.DEVICE if is_load else Tier.HOST,
            source_slots=slots,
            target_slots=slots,
        )
        copier.start(job, ended.put)
        assert ended.get(timeout=_WAIT_S).status is JobStatus.DONE

    def close(self) -> None:
        self.ranks.close()
        if self._group is not None:
            self._group.close()
        self._folder.cleanup()


def mixed_tokens(driver: Driver) -> list[list[int]]:
    """The output of a prompt longer than a window and of a short one, computed in chunks and
    decoded together, greedy and seeded."""
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
    long = driver.add(prompt(41, seed=1), name="long")
    short = driver.add(prompt(6, seed=2), name="short", params=sampled)
    for size in (5, 20):
        driver.step((long, size))
    driver.finish(long, short, count=10)
    return [long.output, short.output]
