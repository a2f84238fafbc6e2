"""What the scheduler reports about one request: new tokens, log-probabilities, and prompt usage."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.types import RequestId


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature and penalties."""

    chosen: float
    rank: int
    """1 is the most likely token."""

    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence. Not modified after it is built.

    Neither frozen nor keyword-only, because one is built for each sequence in each step, and
    that would take four times as long.
    """

    request_id: RequestId
    tokens: list[int]
    """Sampled since the last output; a stop token is included."""

    logprobs: list[TokenLogprobs | None]
    """One entry a token; None where none were asked for."""

    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `refused`, `returned` or `failed` on the last output, None
    before."""

    stop_token: int | None = None
    """The token that ended the output, where one did."""

    usage: Usage | None = None
    """On the first output that has tokens, and on no other."""

    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second on; on the first output that has tokens."""

    detail: str = ""
    """Where it was refused or failed: the reason."""
