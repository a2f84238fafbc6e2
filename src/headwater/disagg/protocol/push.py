"""Pushes of blocks and their outcomes: values that state machines and links share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """One block of a push."""

    slot: int
    """Slot in the sender's memory."""

    index: int
    """Index of the block in the lease. The receiver knows the slot of each index."""

    num_bytes: int
    """Leading bytes of the slot to send: a whole block, or the part that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Blocks for one lease of the receiver. It ends in exactly one `PushDone` or `PushFailed`."""

    job: int
    """The caller's number for it, unique among the pushes of one sender."""

    lease: int
    """Lease of the receiver: 63 random bits, so that no peer can guess another peer's lease."""

    pieces: tuple[BlockPiece, ...]
    """Blocks, in the order in which they are sent."""

    deadline_s: float
    """Time on the sender's clock after which the push fails. `Sender.extend` makes it later."""


class PushFailure(StrEnum):
    """Why a push failed. The receiver knows which of its blocks arrived."""

    UNREACHABLE = "unreachable"  # no connection could be made
    REFUSED = "refused"  # the peer refused the connection: token, version, block size, too many senders
    FENCED = "fenced"  # the lease is fenced, or was never opened
    OUTSIDE = "outside"  # an index or a length outside the lease
    TWICE = "twice"  # another push is sending the same block now
    DAMAGED = "damaged"  # the checksum of a received block is wrong
    LOST = "lost"  # the connection ended before the peer confirmed the bytes
    TIMEOUT = "timeout"  # the deadline has passed
    CANCELLED = "cancelled"  # by `cancel`, before it began
    CLOSED = "closed"  # by `close`


class PushDone(NamedTuple):
    """The receiver has every byte and has verified it. `BlockReceived` says when a block is in
    its slot."""

    job: int
    num_bytes: int


class PushFailed(NamedTuple):
    """The push failed. From now on, changes of the sender's slots cannot reach the receiver."""

    job: int
    reason: PushFailure


class BlockReceived(NamedTuple):
    """A block is in its slot, complete and verified. Reported once for each block of a lease."""

    lease: int
    block: int
    """Index of the block in the lease."""

    num_bytes: int


class LeaseClosed(NamedTuple):
    """The lease is closed: no byte is written to its slots from now on. The last event of a lease.

    It follows a fence, or is reported without one if the receiver could not store a block that
    had arrived.
    """

    lease: int
    num_bytes: int
    """Bytes received in total."""

    blocks: frozenset[int]
    """Indices of the blocks received."""


SenderEvent: TypeAlias = PushDone | PushFailed


ReceiverEvent: TypeAlias = BlockReceived | LeaseClosed


LinkEvent: TypeAlias = SenderEvent | ReceiverEvent
