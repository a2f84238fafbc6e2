"""Starts the other ranks of an engine and brings all ranks to the point where they compute.

rank 0                         ranks 1 … N-1
start processes      ───────▶  import torch
LOAD                 ───────▶  load their part of the weights    (rank 0 loads its own)
                     ◀───────  LOADED: free memory
MEET                 ───────▶  join the process group
OPEN                 ───────▶  make pool and runner              (rank 0 makes its own)
                     ◀───────  READY
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.engine.rundir import RunDir
from headwater.errors import ConfigError
from headwater.launch.limits import StepLimits
from headwater.launch.rank_process import SEND_TIMEOUT_S

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel
    from headwater.device.open import LeadingRunner
    from headwater.device.parallel.group import RankGroup
    from headwater.device.parallel.runner import ParallelRunner

LOG_FORMAT_VARIABLE = "HEADWATER_ENGINE_LOG_FORMAT"
"""Environment variable with the log format for ranks; the engine process sets it."""

_LOAD_TIMEOUT_S = 3600.0
"""Longest time for every rank to read its weights. A rank that dies is noticed at once."""

_OPEN_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 5.0


class RankChild:
    """The process of one rank."""

    def __init__(self, number: int, descriptor: int) -> None:
        log_format = os.environ.get(LOG_FORMAT_VARIABLE, "text")
        arguments = [str(descriptor), str(os.getpid()), log_format, str(number)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.launch.rank_process", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe_end(self) -> str:
        """How the process ended, in a few words; waits a short time for the end."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def kill(self) -> None:
        """Kill the process, even while it is stopped. Calling it twice is safe."""
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)


class RankLauncher:
    """The ranks of one engine, from their start until the runner owns them."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        # Imported here: this engine needs torch in any case.
        from headwater.device.parallel.channel import RankChannel
        from headwater.device.parallel.copier import RankCopies
        from headwater.device.parallel.ranks import Rank, Ranks

        self._config = config
        self._size = config.tensor_parallel_size
        self.devices = rank_devices(config.device, self._size)
        started = []
        for number in range(1, self._size):
            ours, theirs = socket.socketpair()
            with theirs:
                process = RankChild(number, theirs.fileno())
            channel = RankChannel(ours, send_timeout_s=SEND_TIMEOUT_S)
            started.append(Rank(number=number, channel=channel, process=process))
        self.ranks = Ranks(started, clock)
        self.copies = RankCopies(self.ranks)
        self._folder = RunDir()
        """A folder with the file through which the ranks join their group."""
        self.group: RankGroup | None = None
        self._free_bytes = 0

    def load(self) -> "LoadedModel":
        """Load this rank's part of the model; returns when every rank has loaded its own."""
        from headwater.device.memory import free_bytes
        from headwater.device.model import load
        from headwater.device.parallel.channel import RankMessage
        from headwater.device.parallel.messages import Loaded, LoadModel
        from headwater.device.parallel.share import RankShare

        config = self._config
        wanted = [
            LoadModel(
                model=config.model,
                dtype=config.dtype,
                device=self.devices[rank],
                has_fp8_kv=config.kv_cache_dtype == "fp8",
                rank=rank,
                size=self._size,
            )
            for rank in range(1, self._size)
        ]
        self.ranks.tell_each(RankMessage.LOAD, [msgspec.json.encode(one) for one in wanted])
        share = RankShare(rank=0, size=self._size)
        model = load(
            config.model,
            dtype=config.dtype,
            device=self.devices[0],
            has_fp8_kv=config.kv_cache_dtype == "fp8",
            share=share,
        )
        answers = self.ranks.hear(RankMessage.LOADED, timeout_s=_LOAD_TIMEOUT_S)
        free = [msgspec.json.decode(answer, type=Loaded).free_bytes for answer in answers]
        least = min(*free, free_bytes(model))
        # Ranks with the same device share its free memory.
        together = max(self.devices.count(device) for device in self.devices)
        self._free_bytes = least // together
        return model

    @property
    def free_bytes(self) -> int:
        """Memory that every rank may use for KV, after the model is loaded."""
        return self._free_bytes

    def meet(self, model: "LoadedModel", num_blocks: int, limits: StepLimits) -> None:
        """Join all ranks into a group and let them open their runners. This rank opens its own
        at the same time, because both may need collectives."""
        from headwater.device.parallel.channel import RankMessage
        from headwater.device.parallel.group import RankGroup
        from headwater.device.parallel.messages import MeetRanks, OpenRunner

        config = self._config
        assert model.share is not None, "loaded for ranks"
        store = self._folder.path / "ranks"
        backend = _backend(self.devices)
        told = MeetRanks(store=str(store), backend=backend)
        self.ranks.tell(RankMessage.MEET, msgspec.json.encode(told))
        self.group = RankGroup(
            model.share, backend=backend, store=Path(store), device=model.device
        )
        sizes = OpenRunner(
            num_blocks=num_blocks,
            block_tokens=config.block_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            min_rows=model.min_rows,
        )
        self.ranks.tell(RankMessage.OPEN, msgspec.json.encode(sizes))

    def lead(self, own: "LeadingRunner") -> "ParallelRunner":
        """The engine's runner, when every rank is ready. It owns the ranks from now on."""
        from headwater.device.parallel.channel import RankMessage
        from headwater.device.parallel.runner import ParallelRunner

        assert self.group is not None, "the ranks have met"
        self.ranks.hear(RankMessage.READY, timeout_s=_OPEN_TIMEOUT_S)
        self._folder.close()  # a rank may read it until that rank is ready
        return ParallelRunner(own, self.ranks, self.group)

    def close(self) -> None:
        """End the other ranks. Calling it twice is safe."""
        self.ranks.close()
        self._folder.close()


def check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError for settings that do not work with several ranks."""
    if config.peers is not None and config.peers.link == "mooncake":
        raise ConfigError(
            f"--cache-transfer-protocol mooncake does not work with --tensor-parallel-size "
            f"{config.tensor_parallel_size} in this release; use tcp or shm"
        )


def rank_devices(device: str, size: int) -> list[str]:
    """The device of each rank: `cpu` for all, the first GPUs for `cuda`, or one given for each
    (`cuda:0,cuda:2`)."""
    named = [name.strip() for name in device.split(",")]
    if len(named) == 1:
        if device == "cpu" or size == 1:
            return [device] * size
        first = int(device.partition(":")[2] or 0)
        return [f"cuda:{first + rank}" for rank in range(size)]
    if len(named) != size:
        raise ConfigError(
            f"--device names {len(named)} devices for --tensor-parallel-size {size}; give one "
            "for each rank, or `cuda` for the first ones"
        )
    return named


def _backend(devices: list[str]) -> str:
    """The library for collectives. NCCL needs a GPU for each rank; gloo goes through main
    memory."""
    is_alone = len(set(devices)) == len(devices)
    return "nccl" if is_alone and all(d.startswith("cuda") for d in devices) else "gloo"
