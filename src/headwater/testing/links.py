"""Doubles for links: block memory, a log of events, and a network inside one process.

In a `LocalNetwork` the test decides when a block moves: `step` moves one block of the push that
the test chooses. So every interleaving of pushes, fences, cuts and deadlines can be tested.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Event, RLock, Thread

import numpy as np

from headwater.clock import Clock, SystemClock
from headwater.disagg.links.frames import describe
from headwater.disagg.links.interface import BlockMemory, Deliver, Receiver, Sender
from headwater.disagg.links.leases import LeaseBook
from headwater.disagg.protocol.push import (
    BlockPiece,
    BlockReceived,
    LeaseClosed,
    LinkEvent,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
    SenderEvent,
)
from headwater.testing.device_blocks import DeviceGate, PeerArray
from headwater.transfer.shared import SharedPages

_WAIT_S = 30.0


class BlockArray:
    """Contiguous block memory; `gate` blocks callers that request a view. For the `cuda` link it
    represents the memory of a device, whose copies `device` controls."""

    def __init__(self, num_slots: int, block_bytes: int, *, seed: int | None = None) -> None:
        """The memory is zeros, or random bytes made from `seed`."""
        self.block_bytes = block_bytes
        pages = SharedPages(num_slots * block_bytes)
        self.memory = pages.memory
        """The whole memory, for links that register it."""

        self.file: int | None = pages.file
        self._pages = pages
        whole = np.frombuffer(pages.memory, dtype=np.uint8)
        self.rows = whole.reshape(num_slots, block_bytes)
        if seed is not None:
            rng = np.random.default_rng(seed)
            self.rows[:] = rng.integers(0, 256, self.rows.shape, dtype=np.uint8)
        self.gate = Event()
        self.gate.set()
        self.num_bytes = num_slots * block_bytes
        self.device = DeviceGate()

    def map_peer(self, file: int, num_bytes: int) -> PeerArray:
        """The memory of a peer, as if both were on a device."""
        return PeerArray.mapped(file, num_bytes, self.rows, self.device)

    def view(self, slot: int) -> memoryview:
        assert self.gate.wait(_WAIT_S), "the gate was never opened"
        return memoryview(self.rows[slot])


class EventLog:
    """Receives events from any thread, and waits for the event that a test needs."""

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []
        self._changed = Condition()

    def __call__(self, event: LinkEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def outcome(self, job: int, timeout_s: float = _WAIT_S) -> SenderEvent:
        """How a push ended; waits for it."""
        self._await(lambda: bool(self.outcomes(job)), timeout_s)
        return self.outcomes(job)[0]

    def closed(self, lease: int, timeout_s: float = _WAIT_S) -> LeaseClosed:
        """The last event of a lease; waits for it."""
        self._await(lambda: bool(self.closings(lease)), timeout_s)
        return self.closings(lease)[0]

    def outcomes(self, job: int) -> list[SenderEvent]:
        """Every outcome of a push so far; there must never be two."""
        return [
            event
            for event in list(self.events)
            if isinstance(event, PushDone | PushFailed) and event.job == job
        ]

    def closings(self, lease: int) -> list[LeaseClosed]:
        return [e for e in list(self.events) if isinstance(e, LeaseClosed) and e.lease == lease]

    def received(self, lease: int) -> list[int]:
        """Indices of the received blocks of a lease, in order of arrival."""
        events = list(self.events)
        return [e.block for e in events if isinstance(e, BlockReceived) and e.lease == lease]

    def await_received(self, lease: int, count: int, timeout_s: float = _WAIT_S) -> None:
        """Return when this many blocks have been received."""
        self._await(lambda: len(self.received(lease)) >= count, timeout_s)

    def _await(self, came: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            in_time = self._changed.wait_for(came, timeout_s)
        assert in_time, f"nothing came within {timeout_s:g} s; {self.events[-20:]}"


@dataclass
class HeldPush:
    """A push that waits in a `LocalNetwork`."""

    sender: "LocalSender"
    push: Push
    waiting: list[BlockPiece] = field(default_factory=list)
    """Pieces that have not moved."""

    failure: PushFailure | None = None
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.push.deadline_s


class LocalNetwork:
    """Links between instances of one process. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.pushes: list[HeldPush] = []
        """Pushes without an outcome, in the order in which they were made."""

        self.books: dict[str, LeaseBook] = {}
        self.cut: set[str] = set()
        """Unreachable addresses: a push to them fails when it should move."""

        self.lock = RLock()
        self._num_receivers = 0
        self._changed = Event()

    def links(self, memory: BlockMemory, deliver: Deliver) -> "LocalLinks":
        """One instance's end of the network."""
        return LocalLinks(self, memory, deliver)

    def step(self, index: int = 0) -> bool:
        """Move one block of the push at `index`, or end it; False if there is no such push."""
        with self.lock:
            if index >= len(self.pushes):
                return False
            held = self.pushes[index]
            if held.failure is None:
                held.failure = self._obstacle(held) or self._move(held)
            if held.failure is None and held.waiting:
                return True
            del self.pushes[index]
        held.sender.end(held)
        return True

    def run(self) -> None:
        """Move everything that waits."""
        while self.step():
            pass

    @contextmanager
    def pump(self) -> Iterator[None]:
        """A context in which a separate thread moves every block at once."""
        stop = Event()

        def work() -> None:
            while not stop.is_set():
                self._changed.wait(0.05)
                self._changed.clear()
                self.run()

        thread = Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self._changed.set()
            thread.join(_WAIT_S)

    def add(self, held: HeldPush) -> None:
        with self.lock:
            self.pushes.append(held)
        self._changed.set()

    def give_up(self, chosen: Callable[[HeldPush], bool], reason: PushFailure) -> None:
        """End the chosen pushes now."""
        with self.lock:
            ended = [held for held in self.pushes if chosen(held)]
            self.pushes = [held for held in self.pushes if not chosen(held)]
        for held in ended:
            held.failure = reason
            held.sender.end(held)

    def add_receiver(self, book: LeaseBook) -> str:
        with self.lock:
            address = f"local://{self._num_receivers}"
            self._num_receivers += 1
            self.books[address] = book
            return address

    def _obstacle(self, held: HeldPush) -> PushFailure | None:
        if self.clock.now() >= held.deadline_s:
            return PushFailure.TIMEOUT
        address = held.sender.address
        if address in self.cut or address not in self.books:
            begun = len(held.waiting) < len(held.push.pieces)
            return PushFailure.LOST if begun else PushFailure.UNREACHABLE
        return None

    def _move(self, held: HeldPush) -> PushFailure | None:
        """Copy the next block from slot to slot."""
        if not held.waiting:
            return None
        piece = held.waiting.pop(0)
        book = self.books[held.sender.address]
        source = held.sender.memory.view(piece.slot)[: piece.num_bytes]
        sent = [describe(piece, source)]
        arriving = book.begin_write(held.push.lease, sent)
        if isinstance(arriving, PushFailure):
            return arriving
        for at in arriving.new:
            target = arriving.views[at]
            if target is not None:
                target[:] = source
                arriving.verify(at, sent[at].checksum)
        book.end_write(arriving, sent)
        return None


class LocalLinks:
    """One instance's links in a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, memory: BlockMemory, deliver: Deliver) -> None:
        self._network = network
        self._memory = memory
        self._deliver = deliver

    def listen(self, link: str = "local") -> Receiver:
        return LocalReceiver(self._network, LeaseBook(self._memory, self._deliver))

    def connect(self, address: str) -> Sender:
        return LocalSender(self._network, address, self._memory, self._deliver)


class LocalReceiver:
    """A `Receiver` in a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, book: LeaseBook) -> None:
        self.address = network.add_receiver(book)
        self._network = network
        self._book = book

    def open(self, lease: int, slots: Sequence[int]) -> None:
        self._book.open(lease, slots)

    def fence(self, lease: int) -> None:
        self._book.fence(lease)

    def close(self) -> None:
        with self._network.lock:
            self._network.books.pop(self.address, None)
        self._book.fence_all()


class LocalSender:
    """A `Sender` in a `LocalNetwork`."""

    def __init__(
        self, network: LocalNetwork, address: str, memory: BlockMemory, deliver: Deliver
    ) -> None:
        self.address = address
        self.memory = memory
        self._network = network
        self._deliver = deliver
        self._closed = False

    def push(self, push: Push) -> None:
        held = HeldPush(self, push, list(push.pieces))
        if self._closed:
            held.failure = PushFailure.CLOSED
            self.end(held)
        else:
            self._network.add(held)

    def extend(self, lease: int, deadline_s: float) -> None:
        with self._network.lock:
            for held in self._network.pushes:
                if held.sender is self and held.push.lease == lease:
                    held.deadline_s = max(held.deadline_s, deadline_s)

    def cancel(self, lease: int) -> None:
        self._network.give_up(
            lambda held: (
                held.sender is self
                and held.push.lease == lease
                and len(held.waiting) == len(held.push.pieces)
            ),
            PushFailure.CANCELLED,
        )

    def close(self) -> None:
        self._closed = True
        self._network.give_up(lambda held: held.sender is self, PushFailure.CLOSED)

    def end(self, held: HeldPush) -> None:
        """Deliver the outcome of a push that is no longer in the network."""
        if held.failure is not None:
            self._deliver(PushFailed(held.push.job, held.failure))
        else:
            num_bytes = sum(piece.num_bytes for piece in held.push.pieces)
            self._deliver(PushDone(held.push.job, num_bytes))
