"""What the two sides of a hand-off share: their settings, and what they want done.

`PrefillHandoff` and `DecodeHandoff` decide; they take messages, ticks and answers and return
these values. Whoever drives them carries the values out, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headwater.disagg.link import Push
from headwater.disagg.messages import First, Message, Reason
from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """How long each side waits for the other. Durations only: no two clocks are compared."""

    term_s: float = 10.0
    """A lease ends so long after the last heartbeat that D got."""

    margin_s: float = 1.0
    """P reckons with a term shorter by this, and so stops before D frees."""

    renew_s: float = 2.0
    """Between two heartbeats."""

    resend_s: float = 1.0
    """A question without an answer is asked again."""

    start_timeout_s: float = 10.0
    """Longest wait for P's first answer."""

    reserve_timeout_s: float = 10.0
    """Longest wait for room on D, once P has asked."""

    handoff_timeout_s: float = 120.0
    """Longest time from Start to the first token; then D computes."""

    fence_wait_s: float = 2.0
    """Longest wait for a fence before its slots are left in quarantine."""

    return_after_s: float = 30.0
    """A preempted request that has waited so long to resume goes back to the router."""

    max_inflight: int = 64
    """Most hand-offs at once on P; more are refused."""

    pull_min_blocks: int = 4
    """Fewest blocks that P asks D for, rather than computing them."""

    pull_timeout_s: float = 5.0
    """Longest wait for them."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.renew_s < self.term_s - self.margin_s:
            raise ConfigError(
                f"renew_s {self.renew_s:g} must leave time to renew a term of {self.term_s:g} s "
                f"less {self.margin_s:g} s"
            )


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the peer."""

    message: Message


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """P: hand these blocks to the link."""

    push: Push


@dataclass(frozen=True, slots=True)
class CancelPushes:
    """P: push nothing more; what has begun still ends."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """P: the request is not to be computed any further."""


@dataclass(frozen=True, slots=True)
class Release:
    """P: nothing reads its blocks any more."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """D: find room for the request, in its turn."""


@dataclass(frozen=True, slots=True)
class OpenLease:
    """D: let bytes land in these slots."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fence:
    """Let nothing more land."""


@dataclass(frozen=True, slots=True)
class DeliverFirstToken:
    """D: the prompt is here; go on from its first token."""

    first: First


@dataclass(frozen=True, slots=True)
class LocalFallback:
    """D: the first `num_blocks` blocks of the lease are whole; compute the rest."""

    num_blocks: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decline:
    """D: end the request with a refusal, so that somebody else can try."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Keep the slots of the lease from everybody, the request included, until it is quiet."""


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """The lease is quiet: its quarantined slots are anybody's again."""


PrefillAction: TypeAlias = Send | PushBlocks | CancelPushes | Withdraw | Release
DecodeAction: TypeAlias = (
    Send
    | Reserve
    | OpenLease
    | Fence
    | DeliverFirstToken
    | LocalFallback
    | Decline
    | Quarantine
    | FreeQuarantined
)
