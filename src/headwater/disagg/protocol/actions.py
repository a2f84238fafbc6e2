"""What the two sides of a hand-off share: their settings, and what they want done.

`PrefillHandoff` and `DecodeHandoff` decide; they take messages, ticks and answers and return
these values. The caller carries the values out, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headwater.disagg.protocol.messages import First, Message, Reason
from headwater.disagg.protocol.push import Push


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
    """D: end the request with a refusal, so that another instance can try."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Quarantine the slots of the lease until it is quiet; the request may not use them either."""


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """The lease is quiet: free its quarantined slots."""


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
