"""Settings of the scheduler."""

from dataclasses import dataclass
from typing import Literal

from headwater.errors import ConfigError
from headwater.scheduler.pacing import ItlTarget
from headwater.types import LoadPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step, the order of waiting sequences, and what may be cached."""

    max_model_len: int
    """Maximum number of tokens of one sequence, prompt and output together."""

    max_num_seqs: int = 64
    """Maximum number of sequences that run at once."""

    max_batched_tokens: int = 2048
    """Maximum number of tokens computed in one step; longer prompts are computed in chunks."""

    long_prefill_tokens: int | None = None
    """Maximum number of tokens of one prompt computed in one step, so that a long prompt leaves
    room for others; None means as many as the step has."""

    itl: ItlTarget | None = None
    """Target for the time between tokens while prompts are computed; None means no target."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting sequences and of victims: by arrival, or first by the `priority` of the
    request."""

    prefix_caching: bool = True
    """Whether a prompt may reuse blocks that an earlier request computed."""

    output_caching: bool = True
    """Whether blocks with generated tokens are committed too."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end any output, unless its request ignores them."""

    expected_output_tokens: int = 128
    """Output length that admission expects until it has observed some."""

    max_passes: int = 16
    """How many later sequences may be admitted before a blocked one. Then none may pass it any
    more; 0 means that none may ever pass."""

    lookahead: int = 8
    """Maximum number of blocked sequences that one step skips."""

    prefix_wait_min_blocks: int = 4
    """Minimum number of blocks for which a new sequence waits while a running prefill computes
    them."""

    prefix_wait_timeout_s: float = 2.0
    """Longest wait for a prefix that another instance computes and sends. A wait for a prefill
    of this instance has no limit, because computing the prefix again would not be faster."""

    load_policy: LoadPolicy = "priced"
    """Default for requests: what to do about blocks on the host or in storage."""

    load_timeout_s: float = 5.0
    """Longest wait of a request for lower tiers. `wait` has no limit except the deadlines of
    transfers."""

    save_preempted: bool = True
    """Whether the blocks of a preempted sequence are written to the host tier, if there is one."""

    prefetch_sessions: bool = True
    """Whether the blocks of a session are loaded one tier up shortly before the return time
    that its client announced; needs a host tier."""

    max_write_blocks: int = 64
    """Maximum number of blocks that are being written to storage at once."""

    def __post_init__(self) -> None:
        _at_least(1, "max_write_blocks", self.max_write_blocks)
        if self.load_policy not in ("priced", "best_effort", "wait", "deadline"):
            raise ConfigError(
                f"load_policy must be priced, best_effort, wait or deadline, got {self.load_policy!r}"
            )
        if self.load_timeout_s < 0:
            raise ConfigError(f"load_timeout_s cannot be negative, got {self.load_timeout_s}")
        for name in (
            "max_num_seqs",
            "max_batched_tokens",
            "lookahead",
            "prefix_wait_min_blocks",
        ):
            _at_least(1, name, getattr(self, name))
        _at_least(1, "expected_output_tokens", self.expected_output_tokens)
        _at_least(2, "max_model_len", self.max_model_len)
        _at_least(0, "max_passes", self.max_passes)
        if self.long_prefill_tokens is not None:
            _at_least(1, "long_prefill_tokens", self.long_prefill_tokens)
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be fcfs or priority, got {self.policy!r}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens {self.max_batched_tokens} cannot hold one token for each "
                f"of max_num_seqs {self.max_num_seqs} sequences; raise the first or lower the "
                f"second"
            )


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
