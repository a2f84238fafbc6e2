"""Real rank processes for tests: started once, given one model after another."""

import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from headwater.clock import SystemClock
from headwater.device.model import LoadedModel, load
from headwater.device.parallel.channel import RankChannel, RankMessage
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import LoadModel, MeetRanks, OpenRunner
from headwater.device.parallel.ranks import Rank, Ranks
from headwater.device.parallel.runner import ParallelRunner
from headwater.device.parallel.sharding import connect
from headwater.device.parallel.share import RankShare
from headwater.device.runner import TorchRunner
from headwater.launch.ranks import RankChild

_WAIT_S = 120.0


class RankHarness:
    """This process is rank 0; the others are its children."""

    def __init__(self, size: int) -> None:
        self._share = RankShare(rank=0, size=size)
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

    def load(self, folder: Path) -> LoadedModel:
        """Every rank's part of a model."""
        size = self._share.size
        self.ranks.tell_each(
            RankMessage.LOAD,
            [
                msgspec.json.encode(
                    LoadModel(
                        model=str(folder), dtype="auto", device="cpu", rank=rank, size=size
                    )
                )
                for rank in range(1, size)
            ],
        )
        model = load(folder, share=self._share)
        self.ranks.hear(RankMessage.LOADED, timeout_s=_WAIT_S)
        if self._group is None:
            told = MeetRanks(store=f"{self._folder.name}/meet", backend="gloo")
            self.ranks.tell(RankMessage.MEET, msgspec.json.encode(told))
            self._group = RankGroup(self._share, backend="gloo", store=Path(told.store))
        connect(model.module, self._group)
        return model

    def runner(self, model: LoadedModel, **sizes: Any) -> ParallelRunner:
        """A runner over all ranks; what the tests' `Driver` calls a runner class."""
        assert self._group is not None
        own = {name: sizes.pop(name) for name in ("depth",) if name in sizes}
        told = OpenRunner(**sizes, min_rows=model.min_rows)
        self.ranks.tell(RankMessage.OPEN, msgspec.json.encode(told))
        runner = TorchRunner(model, **sizes, **own)
        self.ranks.hear(RankMessage.READY, timeout_s=_WAIT_S)
        return ParallelRunner(runner, self.ranks, self._group)

    def close(self) -> None:
        self.ranks.close()
        if self._group is not None:
            self._group.close()
        self._folder.cleanup()
