"""Actions that the state machines of a hand-off ask for.

`PrefillHandoff`, `DecodeHandoff` and `PeerRead` decide: they take messages, deadlines and events
and return these values. The caller carries them out in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headwater.disagg.protocol.messages import First, Message, Reason
from headwater.disagg.protocol.push import Push


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer."""

    message: Message


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """P: give these blocks to the link."""

    push: Push


@dataclass(frozen=True, slots=True)
class ExtendPushes:
    """P: the lease was renewed; pushes in flight may go on until `deadline_s`."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class CancelPushes:
    """P: cancel pushes that have not begun. A push that has begun ends by itself."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """P: stop computing the request."""


@dataclass(frozen=True, slots=True)
class Release:
    """P: no push reads the blocks any more; release them."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Find free blocks for the request, in its turn."""


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Let the peer write to these slots."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fence:
    """Let the peer write nothing more."""


@dataclass(frozen=True, slots=True)
class DeliverFirstToken:
    """D: the prompt's KV is complete; decode from its first token."""

    first: First


@dataclass(frozen=True, slots=True)
class LocalFallback:
    """The first `num_blocks` blocks of the lease are complete; compute the rest here."""

    num_blocks: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decline:
    """D: end the request with a refusal, so that another instance can serve it."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Let nothing use the slots of the lease, not even the request, until the lease is closed."""


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """The lease is closed: its quarantined slots are free."""


PrefillAction: TypeAlias = Send | PushBlocks | ExtendPushes | CancelPushes | Withdraw | Release
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
