"""What a prompt cost: how much of it was found, where, and why not more."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadUsage:
    """What was chosen for blocks found below the device, and what came of it."""

    choice: str
    """`load_cheaper`, `split`, `recompute_cheaper`, `unmeasured`, `policy_…`, or `none`."""

    host_blocks: int
    """Found on the host when it was chosen; `storage_blocks` in storage, behind them."""

    storage_blocks: int
    num_blocks: int
    """Chosen to be loaded, from the first on; 0 is to compute them all."""

    load_s: float | None
    """Expected seconds of the load; None where nothing was measured."""

    recompute_s: float | None
    """Expected seconds of computing it all."""

    chosen_s: float | None
    """Expected seconds of what was chosen: of a split, to load its head and compute its tail."""

    waited_s: float
    """How long the request waited for nothing else."""

    shortfall: str | None
    """Why less arrived than was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Fixed when a request is first admitted; being preempted later changes nothing in it."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, because their blocks were found."""

    by_tier: Mapping[str, int] = field(default_factory=dict)
    """`cached_tokens` by where the blocks were: device, host, storage, peer."""

    computed: int
    """Prompt tokens that were computed."""

    miss_reason: str | None = None
    """Why the match ended where it did; None when all that can be found was found."""

    queued_s: float = 0.0
    """From the request's arrival to its admission."""

    load: LoadUsage | None = None
    """Where lower tiers had something, or were asked."""
