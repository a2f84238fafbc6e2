"""The seam to a peer's memory: a prefill instance pushes blocks, a decode instance receives.

    Sender (on P) ── push(lease, pieces) ──▶ Receiver (on D) ── bytes ──▶ the lease's slots
       │                                        │
       └─▶ PushDone | PushFailed                └─▶ Landed … Quiet

Nothing here waits: `push` and `fence` begin something, and its end is delivered as an event to
the callable given at construction, from any thread. Which bytes may land where is decided on
the receiving side alone, so a fence holds whatever a sender does afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from headwater.disagg.protocol.push import LinkEvent, Push


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


Deliver: TypeAlias = Callable[[LinkEvent], None]
"""Takes an event, from any thread, at once and without raising."""


class Sender(Protocol):
    """A way to one receiver. Called from one thread; no method waits for the peer."""

    def push(self, push: Push) -> None:
        """Begin; the slots of its pieces stay pinned and unchanged until the outcome."""

    def extend(self, lease: int, deadline_s: float) -> None:
        """Let pushes of this lease that have not ended go on until `deadline_s`, if that is
        later than their deadline. A peer that renews its lease can be slow, not dead."""

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
        """Let nothing more land; one `LeaseClosed` follows, whatever the peer does. Twice is safe."""

    def close(self) -> None:
        """Fence every lease and end every connection. Twice is safe."""


class LinkMaker(Protocol):
    """Makes both ends of a link, for one instance."""

    def listen(self, link: str) -> Receiver:
        """Where peers push to, by the kind of link."""

    def connect(self, address: str) -> Sender:
        """A way to the receiver at an address; ConfigError where that is none."""
