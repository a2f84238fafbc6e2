"""A rank other than the first: executes the messages of rank 0 in order, and decides
nothing."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from headwater.clock import Clock
from headwater.device.memory import free_bytes
from headwater.device.model import LoadedModel, load
from headwater.device.open import (
    FollowingRunner,
    open_copier,
    open_follower,
)
from headwater.device.parallel.channel import (
    ChannelClosed,
    RankChannel,
    RankFrame,
    RankMessage,
    close_files,
)
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import (
    CopyBlocks,
    Loaded,
    LoadModel,
    MapSlab,
    MeetRanks,
    OpenRunner,
    WarmPhase,
    pack_copied,
)
from headwater.device.parallel.share import RankShare
from headwater.device.parallel.step_message import StepUnpacker
from headwater.errors import HeadwaterError, InvariantError
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab

log = logging.getLogger(__name__)

_BLAME_AFTER_S = 1.0
"""When a rank is gone, a collective fails on every rank. The others report it this much later,
so that rank 0 first sees which rank is gone."""


class RankWorker:
    """Executes messages. One thread, except for the ends of copies."""

    def __init__(self, channel: RankChannel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._answering = threading.Lock()
        self._share = RankShare(rank=0, size=1)
        self._model: LoadedModel | None = None
        self._group: RankGroup | None = None
        self._runner: FollowingRunner | None = None
        self._unpacker = StepUnpacker()
        self._copiers: dict[int, DeviceCopier] = {}

    def run(self) -> int:
        """Run until rank 0 is gone; return the exit code."""
        try:
            while True:
                self._do(self._channel.receive())
        except ChannelClosed:
            return 0
        except HeadwaterError as exc:
            self._fail(str(exc))
        except Exception as exc:
            log.exception("rank %d of %d died", self._share.rank, self._share.size)
            if self._group is not None and isinstance(exc, RuntimeError):
                threading.Event().wait(_BLAME_AFTER_S)
            self._fail(f"{type(exc).__name__}: {exc}")
        return 1

    def _do(self, frame: RankFrame) -> None:
        runner = self._runner
        if runner is None:
            self._set_up(frame)
            return
        match frame.kind:
            case RankMessage.STEP:
                runner.follow(self._unpacker.unpack(frame.payload))
            case RankMessage.COPY:
                copy = CopyBlocks.unpack(frame.payload)
                self._copiers[copy.slab].start(copy.job, self._copied)
            case RankMessage.MARK:
                runner.pool.mark_written(np.frombuffer(frame.payload, dtype=np.int64))
            case RankMessage.WARM:
                runner.prepare(WarmPhase(frame.payload[0]))
            case RankMessage.SLAB:
                self._map(runner, msgspec.json.decode(frame.payload, type=MapSlab), frame.files)
            case RankMessage.DROP_SLAB:
                self._copiers.pop(int.from_bytes(frame.payload, "little")).close()
            case _:
                self._set_up(frame)

    def _set_up(self, frame: RankFrame) -> None:
        """Handle messages that come before there is a runner, or that load another model."""
        match frame.kind:
            case RankMessage.LOAD:
                self._load(msgspec.json.decode(frame.payload, type=LoadModel))
            case RankMessage.MEET:
                self._meet(msgspec.json.decode(frame.payload, type=MeetRanks))
            case RankMessage.OPEN:
                self._open(msgspec.json.decode(frame.payload, type=OpenRunner))
            case _:
                raise InvariantError(
                    f"the rank got the message {frame.kind.name} before it had a runner"
                )

    def _load(self, wanted: LoadModel) -> None:
        self._share = RankShare(rank=wanted.rank, size=wanted.size)
        self._runner = None
        self._model = load(
            wanted.model,
            dtype=wanted.dtype,
            device=wanted.device,
            packed=wanted.is_packed,
            has_fp8_kv=wanted.has_fp8_kv,
            share=self._share,
        )
        free = Loaded(free_bytes=free_bytes(self._model))
        self._answer(RankMessage.LOADED, msgspec.json.encode(free))

    def _meet(self, wanted: MeetRanks) -> None:
        assert self._model is not None, "the model is loaded before the ranks meet"
        self._group = RankGroup(
            self._share,
            backend=wanted.backend,
            store=Path(wanted.store),
            device=self._model.device,
        )

    def _open(self, sizes: OpenRunner) -> None:
        if self._model is None or self._group is None:
            raise InvariantError("a rank was told to open before it had a model and a group")
        model = replace(self._model, min_rows=sizes.min_rows)
        self._runner = open_follower(
            model,
            self._group,
            num_blocks=sizes.num_blocks,
            block_tokens=sizes.block_tokens,
            max_num_seqs=sizes.max_num_seqs,
            max_batched_tokens=sizes.max_batched_tokens,
            contiguous_bytes=sizes.contiguous_bytes,
        )
        self._answer(RankMessage.READY)

    def _map(self, runner: FollowingRunner, wanted: MapSlab, files: tuple[int, ...]) -> None:
        if len(files) != 1:
            raise InvariantError("the message about a slab came without its file")
        slab = HostSlab.mapped(
            files[0], wanted.num_slots, wanted.block_bytes, shared=wanted.is_shared
        )
        close_files(files)
        self._copiers[wanted.slab] = open_copier(runner.pool, slab, self._clock)
        self._answer(RankMessage.MAPPED)

    def _copied(self, completion: JobCompletion) -> None:
        """Report the end of a copy to rank 0. Called from a copier's thread."""
        self._answer(RankMessage.COPIED, pack_copied(completion))

    def _answer(self, kind: RankMessage, payload: bytes = b"") -> None:
        with self._answering:
            self._channel.send(kind, payload)

    def _fail(self, sentence: str) -> None:
        try:
            self._answer(RankMessage.FAILED, sentence.encode())
        except OSError:
            log.debug("rank 0 is gone; the message was dropped")
