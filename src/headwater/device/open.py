"""Chooses the runner and the copier of a device: the only place that distinguishes GPU and CPU.

Triton and cuda-python are imported only if the model is on a GPU.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from headwater.clock import Clock, SystemClock
from headwater.device.copier import CpuCopier
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import WarmPhase
from headwater.device.parallel.sharding import connect
from headwater.device.runner import TorchRunner
from headwater.engine.core import Runner
from headwater.engine.masks import MaskWorkers
from headwater.errors import ConfigError
from headwater.scheduler.batch import ScheduledBatch
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab
from headwater.types import Tokens


class LeadingRunner(Runner, Protocol):
    """Rank 0's own runner, if other ranks compute its steps too."""

    announce: Callable[[ScheduledBatch, Tokens], None] | None
    """Called with each step before it is computed, with the carried tokens that are known."""

    announce_warm: Callable[[WarmPhase], None] | None
    """Called with each `WarmPhase` before the first step."""


class FollowingRunner(Protocol):
    """The runner of any other rank."""

    pool: KVPool

    def follow(self, batch: ScheduledBatch) -> None:
        """Compute this rank's part of a step that rank 0 samples."""

    def prepare(self, phase: WarmPhase) -> None:
        """Prepare in the same way as rank 0 before the first step."""


log = logging.getLogger(__name__)

_MAX_PIN_S = 60.0
"""Longest wait for a host tier to be pinned before requests are served."""


def open_runner(  # noqa: PLR0913 -- sizes, each by its name
    model: LoadedModel,
    *,
    num_blocks: int,
    block_tokens: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    shared: bool = False,
    masks: MaskWorkers | None = None,
    group: RankGroup | None = None,
) -> tuple[LeadingRunner, KVPool]:
    """A runner and its pool. Call `prepare_device` before it serves.

    With a `group` it computes rank 0's part of a model that is split over ranks. Peers on this
    machine can map a `shared` pool.
    """
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
    }
    if model.device.type == "cpu":
        if group is not None:
            connect(model.module, group)
        runner = TorchRunner(model, **sizes, shared=shared, masks=masks)
        return runner, runner.pool
    try:
        from headwater.device.gpu.kernel_cache import CompilationCounter, use_kernel_cache

        log.info("kernels are kept in a folder: path=%s", use_kernel_cache(model.device))
        compilations = CompilationCounter()
        compilations.install()
        from headwater.device.gpu.runner import CudaRunner
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"device '{model.device}' needs the package {exc.name!r}; "
            "try: pip install 'headwater[gpu]'"
        ) from exc
    if model.has_fp8_kv and model.planes == 1:
        from headwater.device.gpu.fp8_latents import latent_fault

        fault = latent_fault(model, block_tokens)
        if fault is not None:
            raise ConfigError(
                f"--kv-cache-dtype fp8 does not work on this GPU for models with latent KV (MLA): {fault}; "
                "leave it out"
            )
    on_gpu = CudaRunner(model, **sizes, shared=shared, masks=masks)
    on_gpu.compilations = compilations
    if group is not None:
        on_gpu.connect(group)
    return on_gpu, on_gpu.pool


def open_follower(
    model: LoadedModel,
    group: RankGroup,
    *,
    num_blocks: int,
    block_tokens: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    contiguous_bytes: int | None = None,
) -> FollowingRunner:
    """The runner of a rank other than the first."""
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
    }
    if model.device.type == "cpu":
        connect(model.module, group)
        return TorchRunner(model, **sizes, contiguous_bytes=contiguous_bytes)
    from headwater.device.gpu.kernel_cache import use_kernel_cache

    log.info("kernels are kept in a folder: path=%s", use_kernel_cache(model.device))
    from headwater.device.gpu.rank_runner import FollowingCudaRunner

    runner = FollowingCudaRunner(model, **sizes)
    runner.connect(group)
    return runner


def prepare_device(runner: Runner, copier: DeviceCopier | None) -> Callable[[], int] | None:
    """Do everything that would slow down the first requests: compile and load kernels, capture
    graphs, pin the host tier.

    Returns a counter of kernels compiled or loaded afterwards, which should stay 0; None if
    nothing is ever compiled. Call it before anything is computed or copied.
    """
    if isinstance(runner, TorchRunner):
        return None
    from headwater.device.gpu.copier import CudaCopier
    from headwater.device.gpu.runner import CudaRunner

    assert isinstance(runner, CudaRunner), "there are two runners"
    clock = SystemClock()
    began_s = clock.now()
    runner.warm()
    warm_s = clock.now()
    is_pinned = not isinstance(copier, CudaCopier) or copier.await_pinned(_MAX_PIN_S)
    if not is_pinned:
        log.warning("the host tier is still being pinned; requests are slower meanwhile")
    compilations = runner.compilations
    log.info(
        "the device is prepared: kernels=%d warm_s=%.1f pin_s=%.1f",
        compilations.num_before_ready if compilations else 0,
        warm_s - began_s,
        clock.now() - warm_s,
    )
    if compilations is None:
        return None
    compilations.mark_ready()
    return lambda: compilations.num_after_ready


def open_copier(
    pool: KVPool,
    slab: HostSlab,
    clock: Clock,
    runner: Runner | None = None,
    *,
    for_links: bool = False,
    makes_pages: bool = False,
) -> DeviceCopier:
    """The copier between `pool` and `slab`; it tells `runner`, if given, about layers that have
    arrived. A slab `for_links` gets blocks of collected steps only. With `makes_pages`, a thread
    allocates the pages of the slab on a CPU; on a GPU, pinning allocates them."""
    if pool.device.type == "cpu":
        return CpuCopier(pool, slab, clock, makes_pages=makes_pages)
    from headwater.device.gpu.copier import CudaCopier
    from headwater.device.gpu.runner import CudaRunner

    arrivals = runner.arrivals if isinstance(runner, CudaRunner) else None
    return CudaCopier(pool, slab, clock, arrivals, for_links=for_links)
