"""Simulates hand-offs between instances: messages have a delay, blocks use a link.

The protocol is the real one, with its leases and heartbeats; only network and links are
simulated. Nothing is ever lost here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random

from headwater.clock import VirtualClock
from headwater.disagg.handoff.controller import HandoffController
from headwater.disagg.handoff.resources import HandoffDependencies
from headwater.disagg.peering.network import PeerMessage
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Message
from headwater.disagg.protocol.push import (
    BlockReceived,
    LeaseClosed,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
)
from headwater.replay.links import Delivery, SharedLink
from headwater.scheduler.scheduler import Scheduler
from headwater.types import Slots

Post = Callable[[object], None]

_CONNECTION = 1
"""Every connection has this number, because no simulated connection is ever replaced."""

_MESSAGE_S = 1e-4
"""Delay of a message."""


@dataclass(slots=True)
class _Lease:
    """Blocks and bytes that have arrived for one lease."""

    num_bytes: int = 0
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Host:
    """One instance, as other instances reach it."""

    post: Post
    leases: dict[int, _Lease] = field(default_factory=dict)


class SimFabric:
    """Connects all instances. The times given to it are those of the sender's clock."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._messages: list[tuple[float, int, str, PeerMessage]] = []
        """A heap of messages, by arrival time."""
        self._num_sent = 0

    def enter(self, name: str, post: Post) -> None:
        """Add the instance `name`, which receives events through `post`."""
        self._hosts[name] = _Host(post)

    def next_s(self) -> float:
        """When the next message arrives."""
        return self._messages[0][0] if self._messages else inf

    def deliver(self, now: float) -> None:
        """Deliver every message that has arrived by `now`."""
        while self._messages and self._messages[0][0] <= now:
            _, _, to, message = heappop(self._messages)
            self._hosts[to].post(message)

    def send(self, sender: str, to: str, message: Message, now: float) -> None:
        """Send a message. It arrives after a delay, after all messages sent before."""
        self._num_sent += 1
        envelope = PeerMessage(sender, message, _CONNECTION)
        heappush(self._messages, (now + _MESSAGE_S, self._num_sent, to, envelope))

    def open(self, host: str, lease: int) -> None:
        """Accept blocks of a lease."""
        self._hosts[host].leases[lease] = _Lease()

    def fence(self, host: str, lease: int) -> None:
        """Accept no more blocks of a lease."""
        received = self._hosts[host].leases.pop(lease, None) or _Lease()
        closed = LeaseClosed(lease, received.num_bytes, frozenset(received.blocks))
        self._hosts[host].post(closed)

    def finish_push(self, sender: str, host: str, push: Push) -> None:
        """Deliver the blocks of a push, whose bytes have arrived."""
        lease = self._hosts[host].leases.get(push.lease)
        if lease is None:
            self._hosts[sender].post(PushFailed(push.job, PushFailure.FENCED))
            return
        for piece in push.pieces:
            lease.num_bytes += piece.num_bytes
            lease.blocks.add(piece.index)
            self._hosts[host].post(BlockReceived(push.lease, piece.index, piece.num_bytes))
        num_bytes = sum(piece.num_bytes for piece in push.pieces)
        self._hosts[sender].post(PushDone(push.job, num_bytes))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One instance's connection to the fabric."""

    fabric: SimFabric
    name: str
    clock: VirtualClock
    link: SharedLink
    """The link over which its blocks leave."""


@dataclass(frozen=True, slots=True)
class SimNetwork:
    """The `Network` of one instance."""

    endpoint: _Endpoint

    def send(self, peer: str, message: Message) -> int:
        endpoint = self.endpoint
        endpoint.fabric.send(endpoint.name, peer, message, endpoint.clock.now())
        return _CONNECTION

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class SimSender:
    """The `Sender` of one instance to one receiver."""

    endpoint: _Endpoint
    to: str

    def push(self, push: Push) -> None:
        endpoint = self.endpoint

        def arrive(delivery: Delivery) -> None:
            endpoint.fabric.finish_push(endpoint.name, self.to, push)

        num_bytes = sum(piece.num_bytes for piece in push.pieces)
        endpoint.link.start(num_bytes, arrive, now=endpoint.clock.now())

    def extend(self, lease: int, deadline_s: float) -> None:
        """Nothing to do: simulated pushes have no deadline."""

    def cancel(self, lease: int) -> None:
        """Nothing to do: a push that has begun arrives, and fails if its lease is fenced by
        then."""

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class SimReceiver:
    """The `Receiver` of one instance."""

    endpoint: _Endpoint

    @property
    def address(self) -> str:
        return self.endpoint.name

    def open(self, lease: int, slots: Sequence[int]) -> None:
        self.endpoint.fabric.open(self.endpoint.name, lease)

    def fence(self, lease: int) -> None:
        self.endpoint.fabric.fence(self.endpoint.name, lease)

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class SimMemory:
    """Block memory without derived data."""

    block_bytes: int

    def mark_written(self, slots: Slots) -> None:
        return None


def make_handoffs(
    fabric: SimFabric,
    name: str,
    scheduler: Scheduler,
    clock: VirtualClock,
    links: Mapping[str, SharedLink],
    *,
    block_bytes: int,
    accepts: bool,
) -> HandoffController:
    """The hand-offs of the instance `name`, which prefills for others if it `accepts`."""
    endpoint = _Endpoint(fabric, name, clock, links["peer"])
    numbers = Random(name)
    dependencies = HandoffDependencies(
        network=SimNetwork(endpoint),
        receiver=SimReceiver(endpoint),
        connect=lambda to: SimSender(endpoint, to),
        memory=SimMemory(block_bytes),
        new_id=lambda: numbers.getrandbits(63),
    )
    return HandoffController(scheduler, dependencies, HandoffConfig(), accepts=accepts)
