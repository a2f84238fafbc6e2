"""Receives blocks into staging buffers, then copies them into device slots.

    the link fills a buffer ──▶ copied to its slot ──▶ BlockReceived ──▶ the buffer is free
                                                   … the last one ──▶ LeaseClosed

A block counts as received when it is on the device. So a lease is closed when its last copy has
ended. The link has confirmed the bytes to the sender before that. So a failed copy fences the
lease, and the final byte count tells the hand-off which block is missing.

Buffers are fewer than the blocks that may arrive. Therefore the link writes to *virtual slots*, one
for each expected block, and a buffer is assigned to a virtual slot when its block arrives. A lease
that waits for its peer holds no buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from threading import Lock

from headwater.disagg.links.interface import BlockMemory, Deliver, Receiver
from headwater.disagg.links.staging.buffers import Buffers
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed, LinkEvent

Listen = Callable[[BlockMemory, Deliver], Receiver]
"""Makes a receiver that writes blocks to the given memory."""


class StagingMemory:
    """Block memory of virtual slots. Each expected block has a virtual slot id; a buffer is
    assigned when the link asks for its bytes."""

    def __init__(self, buffers: Buffers, timeout_s: float) -> None:
        self.block_bytes = buffers.block_bytes
        self._buffers = buffers
        self._timeout_s = timeout_s
        self._buffer_of: dict[int, int] = {}
        self._stopped: set[int] = set()

    def view(self, slot: int) -> memoryview:
        # No lock: a block has at most one write at a time (`LeaseBook`), so one thread uses a
        # virtual slot.
        buffer = self._buffer_of.get(slot)
        if buffer is None:
            buffer = self._buffers.await_one(self._timeout_s, lambda: slot in self._stopped)
            if buffer is None:
                raise LinkBroken(f"no staging buffer was free within {self._timeout_s:g} s")
            self._buffer_of[slot] = buffer
        return self._buffers.view(buffer)

    def stop_waiting(self, virtual_slots: Iterable[int]) -> None:
        """Let blocks with these virtual slots stop waiting for a buffer."""
        self._stopped.update(virtual_slots)
        self._buffers.wake()

    def take_buffer(self, virtual_slot: int) -> int | None:
        """Take the buffer of a virtual slot away from it; None if it has none."""
        self._stopped.discard(virtual_slot)
        return self._buffer_of.pop(virtual_slot, None)


class _Lease:
    """A lease, and its blocks between buffers and slots."""

    def __init__(self, slots: Sequence[int], virtual_slots: Iterator[int]) -> None:
        self.slots = list(slots)
        self.virtual_slots = list(islice(virtual_slots, len(slots)))
        self.num_copying = 0
        self.lost: dict[int, int] = {}
        """Bytes of blocks that arrived and could not be copied, by index."""

        self.closed: LeaseClosed | None = None
        """The link's final event, kept while copies are in progress."""


class StagedReceiver:
    """A `Receiver` for device slots."""

    def __init__(
        self,
        listen: Listen,
        buffers: Buffers,
        deliver: Deliver,
        *,
        timeout_s: float,
    ) -> None:
        """An arriving block waits at most `timeout_s` for a buffer."""
        self._buffers = buffers
        self._deliver = deliver
        self._lock = Lock()
        self._leases: dict[int, _Lease] = {}
        self._virtual_slots = count()
        self._staging = StagingMemory(buffers, timeout_s)
        self._receiver = listen(self._staging, self._take)

    @property
    def address(self) -> str:
        return self._receiver.address

    def open(self, lease: int, slots: Sequence[int]) -> None:
        opened = _Lease(slots, self._virtual_slots)
        with self._lock:
            self._leases[lease] = opened
        self._receiver.open(lease, opened.virtual_slots)

    def fence(self, lease: int) -> None:
        self._receiver.fence(lease)
        with self._lock:
            fenced = self._leases.get(lease)
            if fenced is not None:
                self._staging.stop_waiting(fenced.virtual_slots)

    def close(self) -> None:
        for lease in list(self._leases):
            self.fence(lease)
        self._receiver.close()
        self._buffers.close()

    def _take(self, event: LinkEvent) -> None:
        """Process an event of the link."""
        if isinstance(event, BlockReceived):
            self._store(event)
        elif isinstance(event, LeaseClosed):
            with self._lock:
                self._leases[event.lease].closed = event
            self._end(event.lease)

    def _store(self, event: BlockReceived) -> None:
        lease = self._leases[event.lease]
        buffer = self._staging.take_buffer(lease.virtual_slots[event.block])
        assert buffer is not None, "a received block has a buffer"
        with self._lock:
            lease.num_copying += 1

        def stored(is_there: bool) -> None:
            self._buffers.give_back([buffer])
            # Reported before the copy stops counting, because LeaseClosed must be the last
            # event.
            if is_there:
                self._deliver(event)
            with self._lock:
                lease.num_copying -= 1
                if not is_there:
                    lease.lost[event.block] = event.num_bytes
            if not is_there:
                self.fence(event.lease)
            self._end(event.lease)

        self._buffers.store([buffer], [lease.slots[event.block]], stored)

    def _end(self, number: int) -> None:
        """Close a lease if the link has closed it and no copy is in progress."""
        with self._lock:
            lease = self._leases.get(number)
            if lease is None or lease.closed is None or lease.num_copying:
                return
            # From here on only this thread closes the lease: other threads do not find it any
            # more.
            del self._leases[number]
        left = [self._staging.take_buffer(virtual_slot) for virtual_slot in lease.virtual_slots]
        self._buffers.give_back([buffer for buffer in left if buffer is not None])
        num_bytes = lease.closed.num_bytes - sum(lease.lost.values())
        self._deliver(LeaseClosed(number, num_bytes, lease.closed.blocks - lease.lost.keys()))
