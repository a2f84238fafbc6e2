"""Which runner and which copier a device gets: the one place that tells a GPU from a CPU.

Triton and cuda-python are imported only where the model is on a GPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

from headwater.clock import Clock
from headwater.device.copier import CpuCopier
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.device.runner import TorchRunner
from headwater.engine.core import Runner
from headwater.engine.masks import MaskWorkers
from headwater.errors import ConfigError
from headwater.scheduler.batch import ScheduledBatch
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab
from headwater.types import Tokens


class LeadingRunner(Runner, Protocol):
    """Rank 0's own runner, where other ranks compute its steps too."""

    announce: Callable[[ScheduledBatch, Tokens], None] | None
    """Told of each step before it is computed, with the carried tokens that are known."""


class FollowingRunner(Protocol):
    """The runner of any other rank."""

    pool: KVPool

    def follow(self, batch: ScheduledBatch) -> None:
        """Compute this rank's part of a step that rank 0 samples."""


def open_runner(
    model: LoadedModel,
    *,
    num_blocks: int,
    block_tokens: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    shared: bool = False,
    masks: MaskWorkers | None = None,
) -> tuple[LeadingRunner, KVPool]:
    """A runner and its pool; on a GPU with its graphs captured, which takes some seconds.

    A pool in main memory may be `shared`: peers on this machine can be let read it.
    """
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
    }
    if model.device.type == "cpu":
        runner = TorchRunner(model, **sizes, shared=shared, masks=masks)
        return runner, runner.pool
    try:
        from headwater.device.gpu.runner import CudaRunner
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"device '{model.device}' needs the package {exc.name!r}; "
            "try: pip install 'headwater[gpu]'"
        ) from exc
    if model.has_fp8_kv:
        raise ConfigError(
            "--kv-cache-dtype fp8 is not supported on a GPU yet; use --device cpu"
        )
    if model.planes == 1:
        raise ConfigError("models with latent KV (MLA) are not supported on a GPU yet")
    on_gpu = CudaRunner(model, **sizes, masks=masks)
    on_gpu.warm()
    return on_gpu, on_gpu.pool


def open_follower(
    model: LoadedModel,
    *,
    num_blocks: int,
    block_tokens: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    contiguous_bytes: int | None = None,
) -> FollowingRunner:
    """The runner of a rank other than the first."""
    return TorchRunner(
        model,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        contiguous_bytes=contiguous_bytes,
    )


def open_copier(
    pool: KVPool, slab: HostSlab, clock: Clock, runner: Runner | None = None
) -> DeviceCopier:
    """The copier between `pool` and `slab`; `runner`, if given, hears of layers that arrive."""
    if pool.device.type == "cpu":
        return CpuCopier(pool, slab, clock)
    from headwater.device.gpu.copier import CudaCopier
    from headwater.device.gpu.runner import CudaRunner

    arrivals = runner.arrivals if isinstance(runner, CudaRunner) else None
    return CudaCopier(pool, slab, clock, arrivals)
