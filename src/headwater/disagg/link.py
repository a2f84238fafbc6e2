"""The seam to a peer's memory: a prefill instance pushes blocks, a decode instance receives.

    Sender (on P) ── push(lease, pieces) ──▶ Receiver (on D) ── bytes ──▶ the lease's slots
       │                                        │
       └─▶ PushDone | PushFailed                └─▶ Landed … Quiet

Nothing here waits: `push` and `fence` begin something, and its end is delivered as an event to
the callable given at construction, from any thread. Which bytes may land where is decided on
the receiving side alone, so a fence holds whatever a sender does afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable


class BlockMemory(Protocol):
    """Blocks that a link reads or writes: on a processor the KV pool itself, else buffers."""

    @property
    def block_bytes(self) -> int:
        """Bytes of every slot."""

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, in place: writable, contiguous, `block_bytes` long. It may have
        to wait for them; LinkBroken where that takes too long."""


@runtime_checkable
class OneMemory(BlockMemory, Protocol):
    """Block memory in one piece, which a link may register as a whole."""

    @property
    def memory(self) -> memoryview:
        """All of it, the same object each time, slot after slot; no link lives longer."""

    @property
    def file(self) -> int | None:
        """A descriptor of the same bytes that a peer can be handed, who can read them and no
        more; None where they are private."""


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
    """Which lease of the receiver: 63 random bits, so nobody guesses another's."""

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
    """Every byte of a push is with the receiver, and known to be right; `Landed` there says that
    it is in its slot."""

    job: int
    num_bytes: int


class PushFailed(NamedTuple):
    """A push ended without that; whatever becomes of the sender's slots cannot land now."""

    job: int
    reason: PushFailure


@dataclass(frozen=True, slots=True)
class Landed:
    """A block is in its slot, whole and right. Said once a block of a lease."""

    lease: int
    index: int
    num_bytes: int


class SenderQuiet(NamedTuple):
    """A fence holds: no byte of this lease lands from now on. The last event of a lease.

    It comes without a fence where the receiver could not keep a block that had arrived.
    """

    lease: int
    num_bytes: int
    """Bytes that landed in all."""

    blocks: frozenset[int]
    """Indices of the blocks that landed."""


SenderEvent: TypeAlias = PushDone | PushFailed
ReceiverEvent: TypeAlias = Landed | SenderQuiet
LinkEvent: TypeAlias = SenderEvent | ReceiverEvent

Deliver: TypeAlias = Callable[[LinkEvent], None]
"""Takes an event, from any thread, at once and without raising."""


class Sender(Protocol):
    """A way to one receiver. Called from one thread; no method waits for the peer."""

    def push(self, push: Push) -> None:
        """Begin; the slots of its pieces stay pinned and unchanged until the outcome."""

    def cancel(self, lease: int) -> None:
        """Give up what of this lease has not begun; the outcomes still come."""

    def close(self) -> None:
        """Give up everything; every outcome is delivered before this returns. Twice is safe."""


class Receiver(Protocol):
    """Where peers push to. Called from one thread; no method waits for a peer."""

    @property
    def address(self) -> str:
        """What a sender connects to, such as tcp://127.0.0.1:41234."""

    def open(self, lease: int, slots: Sequence[int]) -> None:
        """Let bytes of `lease` land in these slots only: block `i` of it in `slots[i]`."""

    def fence(self, lease: int) -> None:
        """Let nothing more land; one `SenderQuiet` follows, whatever the peer does. Twice is safe."""

    def close(self) -> None:
        """Fence every lease and end every connection. Twice is safe."""


class LinkMaker(Protocol):
    """Makes both ends of a link, for one instance."""

    def listen(self, link: str) -> Receiver:
        """Where peers push to, by the kind of link."""

    def connect(self, address: str) -> Sender:
        """A way to the receiver at an address; ConfigError where that is none."""
