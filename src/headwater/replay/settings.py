"""The simulated deployment: a machine, tier sizes, policies and the number of instances."""

from dataclasses import dataclass
from typing import Literal

from headwater.cache import CacheConfig
from headwater.errors import ConfigError
from headwater.replay.cost import Machine
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.pacing import ItlTarget
from headwater.types import WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """One deployment: `num_instances` equal engines with one shared storage."""

    machine: Machine
    device_gib: float | None = None
    """Device memory for KV of each instance; None means that of the machine."""

    host_gib: float = 0.0
    """Host tier of each instance; 0 means no host tier."""

    storage_gib: float = 0.0
    """Storage that all instances share; 0 means no storage."""

    num_instances: int = 1
    num_prefill: int = 0
    """Number of instances that only prefill for the others, which then only decode. 0 means
    that every instance does both."""

    prefill_threshold: int = 256
    """A prompt is not handed off if the decode instance lacks at most this many tokens."""

    router: str = "cache_aware"
    block_tokens: int = 64
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_itl_ms: float | None = None
    """Target for the time between tokens while prompts are computed; None means no target."""

    max_model_len: int = 1 << 20
    eviction: str = "lru"
    write_policy: str = "auto"
    load_policy: str = "priced"
    storage_order: Literal["reuse", "arrival"] = "reuse"
    fast_forward: bool = True
    """Whether steps that decide nothing are fast-forwarded. The result is the same."""

    def __post_init__(self) -> None:
        if self.num_instances < 1:
            raise ConfigError(f"a replay needs at least 1 instance, got {self.num_instances}")
        if not 0 <= self.num_prefill < self.num_instances:
            raise ConfigError(
                f"at least one of {self.num_instances} instances must decode, got {self.num_prefill} "
                "prefill instances"
            )
        if self.storage_gib and not self.host_gib:
            raise ConfigError("storage needs a host tier to pass through: give --host-gib")
        for name in ("device_gib", "host_gib", "storage_gib"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(
                    f"{name} must be a size in GiB that is not negative, got {value}"
                )
        if self.cache().device_blocks < 1:
            raise ConfigError(
                "the device's memory is too small for one block; raise --device-gib"
            )

    @property
    def block_bytes(self) -> int:
        return self.machine.block_bytes(self.block_tokens)

    @property
    def storage_blocks(self) -> int:
        return self.machine.num_blocks(self.storage_gib, self.block_tokens)

    def role(self, number: int) -> str:
        """The role of the instance `number`."""
        if not self.num_prefill:
            return "mixed"
        return "prefill" if number < self.num_prefill else "decode"

    def cache(self) -> CacheConfig:
        """The settings of each instance's cache."""
        machine = self.machine
        gib = machine.device_gib if self.device_gib is None else self.device_gib
        return CacheConfig(
            device_blocks=machine.num_blocks(gib, self.block_tokens),
            block_tokens=self.block_tokens,
            host_blocks=machine.num_blocks(self.host_gib, self.block_tokens),
            storage=self.storage_blocks > 0,
            write_policy=WritePolicy(self.write_policy),
            eviction=self.eviction,
            storage_order=self.storage_order,
            hint_share=1.0,  # a trace is one tenant, so there is no other tenant to protect
        )

    def scheduler(self) -> SchedulerConfig:
        """The settings of each instance's scheduler."""
        machine = self.machine
        return SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs or machine.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens or machine.max_batched_tokens,
            itl=None if self.max_itl_ms is None else ItlTarget(min_s=self.max_itl_ms / 1e3),
            load_policy=self.load_policy,  # type: ignore[arg-type]
        )
