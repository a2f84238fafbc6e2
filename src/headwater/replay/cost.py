"""What a step and a copy take: a few coefficients, and machines whose coefficients are known.

    step  = launch + max(weights + experts, token × tokens) + pair × pairs + row × rows + context × KV read
    copy  = latency + bytes / bandwidth, the bandwidth shared by the copies of one link

`experts` counts the experts that so many tokens can be expected to touch. `pairs` are (token, token before it) pairs of the prompts being computed: attention grows with
the square of a prompt. Decoding rows read the KV of all their tokens; `KV read` counts those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.errors import ConfigError

GIB = 1 << 30

Count = TypeVar("Count", int, NDArray[np.int64])

OWN_LINKS = ("device_to_host", "host_to_device")
"""Links that each instance has for itself, by the name they have in its statistics."""

SHARED_LINKS = ("host_to_storage", "storage_to_host", "lookup")
"""Links that all instances share: they lead to the one storage."""

PEER_LINK = "peer"
"""Over which an instance's blocks leave for other instances; its own, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds that the parts of a step take."""

    launch_s: float
    """Every step: deciding, launching kernels, sampling."""

    weights_s: float
    """Every step: reading the weights once. Computing tokens hides it, or is hidden by it."""

    token_s: float
    """A token through the layers, whether of a prompt or chosen before."""

    pair_s: float
    """A pair of tokens of a prompt in attention."""

    row_s: float = 0.0
    """A decoding row, beyond its token."""

    context_token_s: float = 0.0
    """A token whose KV a decoding row reads."""

    experts_s: float = 0.0
    """Reading all experts of a mixture of experts once; `weights_s` is then the rest."""

    expert_share: float = 0.0
    """Share of a layer's experts that one token is sent to."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} cannot be negative, got {getattr(self, name)}")
        if self.expert_share > 1.0:
            raise ConfigError(f"expert_share is at most 1, got {self.expert_share}")
        if self.launch_s + self.weights_s <= 0:
            raise ConfigError("a step that takes no time at all would never end")

    def seconds(
        self, *, prompt_tokens: int, pairs: int, rows: int, context: Count
    ) -> "float | NDArray[np.floating[Any]]":
        """One step, or one a `context`: always the same operations in the same order, so that
        many steps at once take bit for bit what they take one by one."""
        tokens = prompt_tokens + rows
        touched = 1.0 - (1.0 - self.expert_share) ** tokens
        weights_s = self.weights_s + self.experts_s * touched
        fixed = self.launch_s + max(weights_s, self.token_s * tokens)
        return (
            fixed + self.pair_s * pairs + self.row_s * rows
        ) + self.context_token_s * context


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """One direction between two tiers."""

    bytes_s: float
    """Of all its copies together."""

    latency_s: float = 0.0
    """Of each copy, however small; it takes none of the bandwidth."""

    max_jobs: int | None = None
    """Copies at once; more wait in line. None is as many as there are."""

    step_share: float = 0.0
    """By how much of itself a step gets longer while a link of the instance's own is busy."""

    def __post_init__(self) -> None:
        if not self.bytes_s > 0 or self.latency_s < 0:
            raise ConfigError(
                "link bandwidth must be positive and its latency not negative, got "
                f"{self.bytes_s} B/s and {self.latency_s} s"
            )
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ConfigError(f"a link that carries {self.max_jobs} copies carries nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a device, with what is around it."""

    name: str
    kv_token_bytes: int
    """KV of one token over all layers."""

    step: StepCost
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    device_gib: float
    """Device memory left for KV, unless the command line says otherwise."""

    num_layers: int = 32
    state_bytes: int = 8192
    """Hidden state of one token, which ranks sum twice in every layer."""

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    note: str = ""
    """Where the figures come from."""

    def block_bytes(self, block_tokens: int) -> int:
        """Bytes of one block."""
        return self.kv_token_bytes * block_tokens

    def num_blocks(self, gib: float, block_tokens: int) -> int:
        """Blocks that fit into `gib`."""
        return int(gib * GIB) // self.block_bytes(block_tokens)
