"""Connects instances in tests: messages, bytes and fences are held until the test releases
them.

It is a double of control connections and links, for one process and a virtual clock. The test
decides what arrives next, twice, late or never. The fabric itself checks one rule: bytes may be
written only to slots that are held for them. Its links keep the contract of `link_contract`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.protocol.messages import Message, Reason
from headwater.disagg.protocol.push import (
    BlockPiece,
    BlockReceived,
    LeaseClosed,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
)
from headwater.types import Slots

Rows = NDArray[np.uint8]
Post = Callable[[object], None]


class Host(Protocol):
    """What the fabric needs from an instance."""

    name: str
    rows: Rows

    def held_slots(self) -> Slots:
        """Slots that sequences of the instance hold."""

    @property
    def post(self) -> Post:
        """Puts an event into the inbox of the instance's loop."""


@dataclass(eq=False)
class FabricConnection:
    """One life of a control connection."""

    client: str
    server: str
    number: int
    is_open: bool = True

    def name_at(self, host: str) -> str:
        """The name that `host` uses for the other end."""
        return self.server if host == self.client else f"{self.client}#{self.number}"


@dataclass(eq=False)
class Packet:
    """A message in transit."""

    connection: FabricConnection
    target: str
    message: Message


@dataclass(eq=False)
class FabricPush:
    """A push in transit. Its bytes may still arrive after its sender was told the outcome."""

    source: str
    target: str
    push: Push
    bytes_of: list[Rows] | None = None
    """A copy of its bytes, made when the sender was told the outcome or died: its slots may be
    reused then."""

    num_sent: int = 0
    num_bytes: int = 0
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.push.deadline_s

    @property
    def is_late(self) -> bool:
        return self.bytes_of is not None


@dataclass(eq=False)
class FabricLease:
    """Slots to which bytes may be written."""

    slots: Sequence[int]
    is_fenced: bool = False
    received: dict[int, int] = field(default_factory=dict)


class HeldFabric:
    """Connects hosts by name. `packets`, `transfers` and `fences` are in transit."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._addresses: dict[str, str] = {}
        self._leases: dict[str, dict[int, FabricLease]] = {}
        self._closed: set[str] = set()
        """Addresses whose receiver is closed."""
        self._connections: list[FabricConnection] = []
        self._num_connections = 0
        self.packets: list[Packet] = []
        self.transfers: list[FabricPush] = []
        self.fences: list[tuple[str, int]] = []
        """Fences that do not hold yet: link address and lease."""
        self.holds_at_once = False
        """Whether fences hold at once, as on links where no write is in progress."""
        self.num_bytes = 0
        """Bytes written since the start."""

    def enter(self, host: Host, link: str) -> None:
        """Connect `host`, which receives blocks at the address `link`."""
        self._hosts[host.name] = host
        self._addresses[link] = host.name
        self._leases[link] = {}

    def crash(self, name: str) -> None:
        """Remove a host and its connections. Bytes that it sent may still be in transit."""
        host = self._hosts.pop(name)
        for transfer in self.transfers:
            if transfer.source == name:
                self._make_late(transfer, host)
        for connection in self._connections:
            if connection.is_open and name in (connection.client, connection.server):
                self.cut(connection)
        for link in [link for link, owner in self._addresses.items() if owner == name]:
            del self._addresses[link]
            del self._leases[link]
            self.fences = [entry for entry in self.fences if entry[0] != link]

    def connections(self) -> list[FabricConnection]:
        """The open connections."""
        return [connection for connection in self._connections if connection.is_open]

    def cut(self, connection: FabricConnection) -> None:
        """End a connection: both ends are told, and messages in transit are lost."""
        connection.is_open = False
        self.packets = [p for p in self.packets if p.connection is not connection]
        for name in (connection.client, connection.server):
            if name in self._hosts:
                peer = connection.name_at(name)
                self._hosts[name].post(PeerLost(peer, Reason.LOST, connection.number))

    def send(self, source: str, peer: str, message: Message) -> int:
        """Send from `source` to the end that it calls `peer`; return the number of the
        connection."""
        connection = self._connection(source, peer)
        if connection is None:
            self._num_connections += 1
            lost = PeerLost(peer, Reason.UNREACHABLE, self._num_connections)
            self._hosts[source].post(lost)
            return lost.connection
        target = connection.server if source == connection.client else connection.client
        self.packets.append(Packet(connection, target, message))
        return connection.number

    def deliver(self, packet: Packet, *, again: bool = False) -> None:
        """Let a message arrive; with `again` it will arrive once more."""
        if not again:
            self.packets.remove(packet)
        host = self._hosts[packet.target]
        peer = packet.connection.name_at(packet.target)
        host.post(PeerMessage(peer, packet.message, packet.connection.number))

    def drop(self, packet: Packet) -> None:
        """Lose a message."""
        self.packets.remove(packet)

    def move(self, transfer: FabricPush) -> None:
        """Let the next block of a push arrive; after the last one its sender is told."""
        piece = transfer.push.pieces[transfer.num_sent]
        carried = (
            self._hosts[transfer.source].rows[piece.slot]
            if transfer.bytes_of is None
            else transfer.bytes_of[transfer.num_sent]
        )
        transfer.num_sent += 1
        transfer.num_bytes += piece.num_bytes
        self._receive(transfer, piece, carried)
        if transfer.num_sent == len(transfer.push.pieces) and transfer in self.transfers:
            self.transfers.remove(transfer)
            if not transfer.is_late:
                done = PushDone(transfer.push.job, transfer.num_bytes)
                self._hosts[transfer.source].post(done)

    def fail(self, transfer: FabricPush, reason: PushFailure = PushFailure.LOST) -> None:
        """Tell the sender that a push failed. Bytes in transit may still arrive."""
        if not transfer.is_late:
            host = self._hosts[transfer.source]
            self._make_late(transfer, host)
            host.post(PushFailed(transfer.push.job, reason))

    def repeat(self, transfer: FabricPush) -> None:
        """Send the bytes of a push once more: they arrive late, or again."""
        if transfer.num_sent:
            copy = FabricPush(
                transfer.source, transfer.target, transfer.push, transfer.bytes_of
            )
            # A late message belongs to the sender it came from, which may have been replaced.
            if not copy.is_late:
                self._make_late(copy, self._hosts[transfer.source])
            self.transfers.append(copy)

    def vanish(self, transfer: FabricPush) -> None:
        """Drop the bytes of a late push."""
        self.transfers.remove(transfer)

    def settle_fence(self, entry: tuple[str, int]) -> None:
        """Let a fence hold: nothing is written from now on, and the receiver is told."""
        self.fences.remove(entry)
        link, number = entry
        lease = self._leases[link].pop(number)
        closed = LeaseClosed(number, sum(lease.received.values()), frozenset(lease.received))
        self._hosts[self._addresses[link]].post(closed)

    def expire(self, now: float) -> None:
        """Fail pushes whose deadline has passed."""
        for transfer in list(self.transfers):
            if not transfer.is_late and transfer.deadline_s <= now:
                self.fail(transfer, PushFailure.TIMEOUT)

    def push(self, source: str, link: str, push: Push) -> None:
        """Start a push to the address `link`. It fails if no open receiver has this address."""
        if link in self._addresses and link not in self._closed:
            self.transfers.append(FabricPush(source, link, push))
        else:
            self.refuse(source, push, PushFailure.UNREACHABLE)

    def extend(self, source: str, link: str, lease: int, deadline_s: float) -> None:
        """Set the deadline of all pushes of `lease` that have not ended to `deadline_s`, if that
        is later."""
        for transfer in self.transfers:
            mine = (transfer.source, transfer.target, transfer.push.lease)
            if mine == (source, link, lease):
                transfer.deadline_s = max(transfer.deadline_s, deadline_s)

    def cancel(self, source: str, link: str, lease: int) -> None:
        """Fail pushes of `lease` that have not begun; their bytes do not arrive."""
        for transfer in list(self.transfers):
            mine = (transfer.source, transfer.target, transfer.push.lease)
            if mine == (source, link, lease) and not (transfer.num_sent or transfer.is_late):
                self.transfers.remove(transfer)
                self.refuse(source, transfer.push, PushFailure.CANCELLED)

    def refuse(self, source: str, push: Push, reason: PushFailure) -> None:
        """Fail a push of `source` before anything of it is in transit."""
        self._hosts[source].post(PushFailed(push.job, reason))

    def close_sender(self, source: str, link: str) -> None:
        """Fail all pushes of one sender."""
        for transfer in list(self.transfers):
            if (transfer.source, transfer.target) == (source, link):
                self.fail(transfer, PushFailure.CLOSED)

    def close_receiver(self, link: str) -> None:
        """Close a receiver; its leases end as after a fence."""
        self._closed.add(link)
        for number in list(self._leases.get(link, {})):
            self.fence(link, number)

    def open_lease(self, link: str, number: int, slots: Sequence[int]) -> None:
        """Allow bytes of lease `number` to be written to `slots`."""
        self._leases[link][number] = FabricLease(slots)

    def fence(self, link: str, number: int) -> None:
        """Begin a fence; bytes may be written until it holds."""
        lease = self._leases[link].get(number)
        if lease is not None and not lease.is_fenced:
            lease.is_fenced = True
            self.fences.append((link, number))
            if self.holds_at_once:
                self.settle_fence((link, number))

    def _receive(self, transfer: FabricPush, piece: BlockPiece, carried: Rows) -> None:
        owner = self._addresses.get(transfer.target)
        lease = self._leases.get(transfer.target, {}).get(transfer.push.lease)
        index, num_bytes = piece.index, piece.num_bytes
        if owner is None or lease is None or index >= len(lease.slots):
            outside = owner is not None and lease is not None
            self.fail(transfer, PushFailure.OUTSIDE if outside else PushFailure.FENCED)
            return
        host, slot = self._hosts[owner], lease.slots[index]
        held = host.held_slots()
        assert slot in held, f"bytes arrive in slot {slot}, which no lease holds"
        if index not in lease.received:
            host.rows[slot][:num_bytes] = carried[:num_bytes]
            self.num_bytes += num_bytes
            lease.received[index] = num_bytes
            host.post(BlockReceived(transfer.push.lease, index, num_bytes))

    def _make_late(self, transfer: FabricPush, host: Host) -> None:
        if not transfer.is_late:
            slots = [piece.slot for piece in transfer.push.pieces]
            transfer.bytes_of = [host.rows[slot].copy() for slot in slots]

    def _connection(self, source: str, peer: str) -> FabricConnection | None:
        for connection in self.connections():
            ends = (connection.client, connection.server)
            if source in ends and connection.name_at(source) == peer:
                return connection
        if peer not in self._hosts:
            return None
        self._num_connections += 1
        connection = FabricConnection(source, peer, self._num_connections)
        self._connections.append(connection)
        return connection
