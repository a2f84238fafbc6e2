"""What a push of blocks is, and how it ends: values that state machines and links share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """One block on its way."""

    slot: int
    """Where it is in the sender's memory."""

    index: int
    """Which block of the lease it is; the receiver knows that block's slot."""

    num_bytes: int
    """Leading bytes of the slot that travel: all of a block, or as much as is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Blocks for one lease of the receiver; ends in exactly one `PushDone` or `PushFailed`."""

    job: int
    """The caller's number for it, in its outcome; unique among the pushes of one sender."""

    lease: int
    """Which lease of the receiver: 63 random bits, so that leases of others cannot be guessed."""

    pieces: tuple[BlockPiece, ...]
    """Sent in this order."""

    deadline_s: float
    """The moment, on the sender's clock, after which the outcome is a failure."""


class PushFailure(StrEnum):
    """Why a push did not end well. What of it landed, the receiver knows."""

    UNREACHABLE = "unreachable"  # no connection could be made
    REFUSED = "refused"  # the peer does not let us in: token, version, block size, too many
    FENCED = "fenced"  # the lease is fenced, or never was
    OUTSIDE = "outside"  # an index or a length that the lease does not have
    TWICE = "twice"  # a block that is arriving by another push right now
    DAMAGED = "damaged"  # bytes arrived that are not those that were sent
    LOST = "lost"  # the connection ended before the peer said that the bytes landed
    TIMEOUT = "timeout"  # the deadline came first
    CANCELLED = "cancelled"  # by `cancel`, before it began
    CLOSED = "closed"  # by `close`


class PushDone(NamedTuple):
    """Every byte of a push is with the receiver, and known to be right; `BlockReceived` there says that
    it is in its slot."""

    job: int
    num_bytes: int


class PushFailed(NamedTuple):
    """A push ended without that; whatever becomes of the sender's slots cannot land now."""

    job: int
    reason: PushFailure


@dataclass(frozen=True, slots=True)
class BlockReceived:
    """A block is in its slot, whole and right. Said once a block of a lease."""

    lease: int
    index: int
    num_bytes: int


class LeaseClosed(NamedTuple):
    """A fence holds: no byte of this lease lands from now on. The last event of a lease.

    It comes without a fence where the receiver could not keep a block that had arrived.
    """

    lease: int
    num_bytes: int
    """Bytes that landed in all."""

    blocks: frozenset[int]
    """Indices of the blocks that landed."""


SenderEvent: TypeAlias = PushDone | PushFailed


ReceiverEvent: TypeAlias = BlockReceived | LeaseClosed


LinkEvent: TypeAlias = SenderEvent | ReceiverEvent
