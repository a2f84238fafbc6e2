"""Interface to a peer's block memory: one instance pushes blocks, another one receives them.

    Sender (on P) ── push(lease, pieces) ──▶ Receiver (on D) ── bytes ──▶ the lease's slots
       │                                        │
       └─▶ PushDone | PushFailed                └─▶ BlockReceived … LeaseClosed

No method waits. `push` and `fence` begin something; its end is an event, delivered from any thread
to the callable given at construction. Only the receiver decides which bytes are written where. So
a fence holds whatever the sender does afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from headwater.disagg.protocol.push import LinkEvent, Push


class BlockMemory(Protocol):
    """Blocks that a link reads or writes: the KV pool in main memory, or staging buffers."""

    @property
    def block_bytes(self) -> int:
        """Size of a slot."""

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot: writable, contiguous, `block_bytes` long, not a copy. It may
        wait for a free staging buffer; LinkBroken if that takes too long."""


@runtime_checkable
class OneMemory(BlockMemory, Protocol):
    """Block memory in one contiguous piece, which a link may register as a whole."""

    @property
    def memory(self) -> memoryview:
        """All slots, one after the other; the same object each time. It outlives every link."""

    @property
    def file(self) -> int | None:
        """Descriptor of the same memory, which a peer may map read-only; None if it is
        private."""


class CopyInProgress(Protocol):
    """A copy that was started on a device."""

    def wait(self) -> None:
        """Return when every byte is in its slot. DeviceError if the copy failed; in this case,
        too, nothing more of it is written."""


class PeerBlocks(Protocol):
    """The blocks of a peer, mapped here for this device. Used by the thread that mapped them."""

    @property
    def num_slots(self) -> int:
        """Slots of the peer."""

    @property
    def is_near(self) -> bool:
        """Whether they are on this device, which copies them as fast as its own blocks."""

    def start_copy(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> CopyInProgress:
        """Start to copy the leading `sizes` bytes of the peer's slots `sources` to the own slots
        `targets`. Does not wait. DeviceError if it cannot start."""

    def close(self) -> None:
        """Unmap the memory. No copy is in progress. The peer may be dead already."""


@runtime_checkable
class DeviceMemory(BlockMemory, Protocol):
    """Blocks on a device, which peers on this machine can map. No link has their bytes in main
    memory, so `view` returns an empty view."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory behind `file`."""

    @property
    def file(self) -> int | None:
        """Descriptor of the memory of all slots; None if it cannot be passed to peers."""

    def map_peer(self, file: int, num_bytes: int) -> PeerBlocks:
        """Map the memory behind a descriptor that a peer passed. It stays valid until `close`,
        even if the peer dies. DeviceError if this device cannot map it."""


@runtime_checkable
class HostReader(BlockMemory, Protocol):
    """Blocks on a device that may be able to read main memory of a peer."""

    def can_map_host(self) -> bool:
        """Whether this device can read main memory of a peer."""

    def map_host(self, memory: memoryview) -> PeerBlocks:
        """Let this device read a peer's main memory, which is mapped here read-only. It stays
        mapped until `close`. DeviceError if the device cannot read it."""


Deliver: TypeAlias = Callable[[LinkEvent], None]
"""Takes an event from any thread. It must return at once and not raise."""


class Sender(Protocol):
    """Sends blocks to one receiver. Called from one thread; no method but `close` waits."""

    def push(self, push: Push) -> None:
        """Begin a push. Its slots stay pinned and unchanged until the outcome."""

    def extend(self, lease: int, deadline_s: float) -> None:
        """Let pushes of this lease that have not ended go on until `deadline_s`, if that is
        later than their deadline. A peer that renews its lease may be slow, but is not dead."""

    def cancel(self, lease: int) -> None:
        """Cancel pushes of this lease that have not begun. Their outcomes still come."""

    def close(self) -> None:
        """Cancel everything. Every outcome is delivered before this returns. Calling it twice
        is safe."""


class Receiver(Protocol):
    """Receives blocks from peers. Called from one thread; no method waits for a peer."""

    @property
    def address(self) -> str:
        """Address that a sender connects to, such as tcp://127.0.0.1:41234."""

    def open(self, lease: int, slots: Sequence[int]) -> None:
        """Let peers write blocks of `lease` to these slots only: block `i` to `slots[i]`."""

    def fence(self, lease: int) -> None:
        """Let peers write nothing more to the slots of `lease`. One `LeaseClosed` follows,
        whatever the peers do. Calling it twice is safe."""

    def close(self) -> None:
        """Fence every lease and end every connection. Calling it twice is safe."""


class LinkMaker(Protocol):
    """Makes senders and receivers for one instance."""

    def listen(self, link: str) -> Receiver:
        """A receiver of this kind of link."""

    def connect(self, address: str) -> Sender:
        """A sender to the receiver at `address`. ConfigError if the address is not valid."""
