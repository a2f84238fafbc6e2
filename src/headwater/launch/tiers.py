"""Builds the tiers below the device (host slab, copier, storage), and describes them for the
operator."""

import os

from headwater.cache import Namespace, TieredCache
from headwater.cache.keys import KeyScheme
from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.device.budget import free_main_bytes
from headwater.errors import ConfigError
from headwater.launch.host_memory import HostMemory
from headwater.storage.base import Opening
from headwater.storage.breaker import BreakerConfig
from headwater.storage.codec import BlockFormat
from headwater.storage.guard import GuardedStorage
from headwater.storage.redis.resp import Address
from headwater.storage.registry import open_storage
from headwater.transfer.layout import KVLayout
from headwater.transfer.mover import Mover
from headwater.transfer.slab import HostSlab, slot_bytes
from headwater.transfer.workers import StorageWorkers

_GIB = 1 << 30

_MAX_GPU_BYTES = 64 * _GIB
"""Largest default host tier. Its memory is pinned, so no other process can use it."""

_MAX_CPU_BYTES = 4 * _GIB
_MIN_BYTES = _GIB
"""Smallest default host tier: with less free memory there is no host tier."""

_WRITTEN = {
    "write_through": "every computed block is written to it at once",
    "auto": "a block is written to it before it leaves the device",
    "write_through_selective": "a block is written to it when it is first found again",
    "write_back": "a block is written to it when the device is about to evict it",
    "none": "blocks are not written to it when they are computed or evicted",
}

_LOADED = {
    "priced": "loaded or computed, whichever was measured to be faster",
    "best_effort": "loaded or computed, whichever is faster; no request waits for storage",
    "wait": "always loaded, however long it takes",
    "deadline": "always loaded",
}


def host_blocks(config: EngineConfig, layout: KVLayout, *, claimed_bytes: int = 0) -> int:
    """Number of host blocks; 0 without a host tier. Raises ConfigError when it does not fit.

    `claimed_bytes` of the free memory belong to other engines that are starting.
    """
    if not config.may_have_host_tier:
        return 0
    # Imported here: torch is already imported when a layout exists.
    from headwater.device.memory import num_machine_gpus

    free = max(free_main_bytes() - claimed_bytes, 0)
    if config.swap_space_gib is None:
        size = default_host_bytes(config, free_bytes=free, num_gpus=num_machine_gpus())
        return size // slot_bytes(layout.block_bytes)
    if config.swap_space_gib * _GIB > free:
        # The system would allocate the memory and kill the process when the tier has filled.
        raise ConfigError(
            f"--swap-space {config.swap_space_gib:g} is more than the {free / _GIB:.1f} GiB of "
            "main memory that are free; lower it"
        )
    num_blocks = int(config.swap_space_gib * _GIB) // slot_bytes(layout.block_bytes)
    if not num_blocks:
        raise ConfigError(
            f"--swap-space {config.swap_space_gib:g} is too small for one block of "
            f"{layout.block_bytes / (1 << 20):.1f} MiB; raise --swap-space"
        )
    return num_blocks


def default_host_bytes(config: EngineConfig, *, free_bytes: int, num_gpus: int) -> int:
    """Size of the host tier without `--swap-space`, in whole GiB; 0 means no host tier.

    On GPUs, each GPU of the machine has an equal part of half of the free main memory, at most
    64 GiB. The size is the sum of the parts of the GPUs that this engine uses. So engines on
    different GPUs do not take memory from each other. `free_bytes` is already within the limit
    of the control group. On a CPU the host tier only buffers what storage reads and writes.
    """
    if config.device == "cpu":
        size = min(free_bytes // 4, _MAX_CPU_BYTES)
    else:
        used = min(config.tensor_parallel_size, num_gpus)
        size = used * min(free_bytes // 2 // num_gpus, _MAX_GPU_BYTES)
    if size >= _MIN_BYTES:
        return size // _GIB * _GIB
    if config.storage_backend is not None:
        raise ConfigError(
            f"--kvcache-storage-backend needs a host tier, and {free_bytes / _GIB:.1f} GiB of free "
            "main memory are too little to choose one: give --swap-space"
        )
    return 0


def open_mover(
    config: EngineConfig, cache: TieredCache, memory: HostMemory, clock: Clock
) -> Mover:
    """The mover for the existing tiers."""
    num_blocks = cache.config.host_blocks
    if not num_blocks:
        return Mover()
    slab = memory.kept_slab(num_blocks)
    workers = _open_workers(config, cache, slab, clock)
    copier = memory.open_copier(slab)
    return Mover(copier, workers, block_bytes=memory.block_bytes)


def describe_tiers(
    config: EngineConfig, layout: KVLayout, num_host_blocks: int
) -> tuple[str, ...]:
    """One line for each tier below the device: what fills it, and how it is read."""
    if not num_host_blocks:
        if config.may_have_host_tier:
            return (
                "host    none: too little main memory is free; --swap-space GIB sets a size",
            )
        return ("host    none; --swap-space GIB adds main memory below the device",)
    size = f"{num_host_blocks * slot_bytes(layout.block_bytes) / _GIB:.2f} GiB"
    if config.swap_space_gib is None:
        size += ", chosen by free memory; --swap-space changes it"
    saved = "preempted sequences are" if config.save_preempted else "preempted ones are not"
    written = f"{_WRITTEN[config.write_policy]}; {saved} saved"
    lines = [f"host    {num_host_blocks:,} blocks ({size}), empty; {written}"]
    if config.storage_backend is not None:
        lines.append(
            f"storage {_storage(config)}; it also gets the blocks on the host, as fast as it accepts "
            "them, and is asked about each prompt that is not in memory"
        )
    bound = (
        "" if config.load_policy == "wait" else f", waits end after {config.load_timeout_s:g} s"
    )
    lines.append(f"loads   found blocks are {_LOADED[config.load_policy]}{bound}")
    return tuple(lines)


def _storage(config: EngineConfig) -> str:
    """The backend and its location, if the settings have one; never a password."""
    name, settings = config.storage_backend, config.storage_config
    if name == "redis" and "url" in settings:
        return f"{name}, {Address.parse(str(settings['url']))}"
    place = settings.get("path", settings.get("master"))
    return f"{name}, {place}" if place and name in ("file", "mooncake") else f"{name}"


def _open_workers(
    config: EngineConfig, cache: TieredCache, slab: HostSlab, clock: Clock
) -> StorageWorkers | None:
    if config.storage_backend is None:
        return None
    return StorageWorkers(open_backend(config, cache.scheme, slab, clock), slab, clock)


def open_backend(
    config: EngineConfig, scheme: KeyScheme, slab: HostSlab, clock: Clock
) -> GuardedStorage:
    """The storage backend of `config`, for blocks of `scheme` in `slab`."""
    assert config.storage_backend is not None, "called only with a storage backend"
    opening = Opening(
        format=BlockFormat(
            # The root key of a deployment identifies the format of its blocks.
            fingerprint=scheme.root(Namespace()),
            block_bytes=slab.block_bytes,
        ),
        clock=clock,
        memory=slab.memory,
        environ=dict(os.environ),
    )
    backend = open_storage(
        config.storage_backend,
        config.storage_config,
        opening,
        is_optional=config.storage_is_optional,
    )
    return GuardedStorage(backend, BreakerConfig(), clock)
