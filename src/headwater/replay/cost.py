"""The cost model of steps and copies: a few coefficients for each machine.

    step  = launch + max(weights + experts, token × tokens) + pair × pairs + row × rows + context × KV read
    copy  = latency + bytes / bandwidth, the bandwidth shared by the copies of one link

`experts` is the time to read the experts that these tokens are expected to use. `pairs` are
(token, token before it) pairs of the prompts being computed: attention grows with the square of
a prompt. Decoding rows read the KV of all their tokens; `KV read` counts those.
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
"""Links that each instance has for itself, by their names in its statistics."""

SHARED_LINKS = ("host_to_storage", "storage_to_host", "lookup")
"""Links that all instances share: they lead to the one storage."""

PEER_LINK = "peer"
"""The link over which an instance sends blocks to other instances; each instance has its
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of the parts of a step."""

    launch_s: float
    """Fixed time of every step: scheduling, kernel launches, sampling."""

    weights_s: float
    """Time to read the weights once in every step. It overlaps with computing tokens."""

    token_s: float
    """One token through the layers, in a prompt or in decoding."""

    pair_s: float
    """One pair of prompt tokens in attention."""

    row_s: float = 0.0
    """Time for each decode row, in addition to its token."""

    context_token_s: float = 0.0
    """Time for each token whose KV a decode row reads."""

    experts_s: float = 0.0
    """Time to read all experts of a mixture of experts once; `weights_s` is then the time for
    the other weights."""

    expert_share: float = 0.0
    """Share of a layer's experts that one token uses."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} cannot be negative, got {getattr(self, name)}")
        if self.expert_share > 1.0:
            raise ConfigError(f"expert_share must be at most 1, got {self.expert_share}")
        if self.launch_s + self.weights_s <= 0:
            raise ConfigError("a step must take some time: give launch_s or weights_s")

    def seconds(
        self, *, prompt_tokens: int, pairs: int, rows: int, context: Count
    ) -> "float | NDArray[np.floating[Any]]":
        """Seconds of one step; if `context` is an array, of one step for each of its entries.
        The operations always have the same order, so many steps at once give bit for bit the
        same result as single steps."""
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
    """Bandwidth of all its copies together."""

    latency_s: float = 0.0
    """Latency of each copy, whatever its size; it uses no bandwidth."""

    max_jobs: int | None = None
    """Copies that run at once; more wait. None means no limit."""

    step_share: float = 0.0
    """Share by which a step becomes longer while this link is busy; used for an instance's own
    links only."""

    def __post_init__(self) -> None:
        if not self.bytes_s > 0 or self.latency_s < 0:
            raise ConfigError(
                "link bandwidth must be positive and its latency not negative, got "
                f"{self.bytes_s} B/s and {self.latency_s} s"
            )
        if self.max_jobs is not None and self.max_jobs < 1:
            raise ConfigError(
                f"a link must carry at least one copy, got max_jobs {self.max_jobs}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a device, with its links."""

    name: str
    kv_token_bytes: int
    """KV of one token over all layers."""

    step: StepCost
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    device_gib: float
    """Device memory left for KV, unless the command line sets it."""

    num_layers: int = 32
    state_bytes: int = 8192
    """Bytes of the hidden state of one token, which ranks sum twice in every layer."""

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
