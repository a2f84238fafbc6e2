"""What both sides of hand-offs share: outside dependencies, counts, and senders to peers.

Tests and the simulator pass their own dependencies.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headwater.disagg.links.interface import Receiver, Sender
from headwater.disagg.peering.network import Network
from headwater.disagg.protocol.messages import Reason
from headwater.errors import ConfigError
from headwater.types import Slots


class Memory(Protocol):
    """Device blocks that a link may write without the runner's knowledge."""

    @property
    def block_bytes(self) -> int: ...

    def mark_written(self, slots: Slots) -> None:
        """A link wrote to `slots`: data derived from them is stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDependencies:
    """Everything that the hand-offs of one instance need from outside."""

    network: Network
    receiver: Receiver
    connect: Callable[[str], Sender]
    """Makes a sender to the receiver at an address, without waiting for a connection. Raises
    ConfigError if the address is not valid."""

    memory: Memory
    new_id: Callable[[], int]
    """Makes a random number of 63 bits. It must not be guessable: it names a lease."""


_REMEMBERED = 4096


@dataclass(slots=True)
class SideTotals:
    """Counts of one side since the instance started."""

    num_asks: int = 0
    """P: Ask messages sent. D: Ask messages that made it look for free blocks."""

    num_done: int = 0
    """Hand-offs that succeeded."""

    failures: Counter[str] = field(default_factory=Counter)
    """Hand-offs that failed, by reason."""

    num_bytes: int = 0
    """P: bytes pushed. D: bytes received in hand-offs that succeeded."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent by successful hand-offs, in total, by phase."""


class Ended:
    """Outcomes of the latest hand-offs, so that a late message gets the right answer."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[int, Reason | None] = OrderedDict()

    def note(self, handoff: int, outcome: Reason | None) -> None:
        """Note the outcome of `handoff`; None is success."""
        self._outcomes[handoff] = outcome
        if len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)

    def __contains__(self, handoff: int) -> bool:
        return handoff in self._outcomes

    def was_done(self, handoff: int) -> bool:
        """Whether the hand-off is remembered and succeeded."""
        return self._outcomes.get(handoff, Reason.GONE) is None


_MAX_ADDRESSES = 4
"""Maximum number of addresses of one connection. A peer has one receiver, and each sender takes
memory."""


class SenderPool:
    """Senders by peer and by the address at which the peer receives blocks, made on first use."""

    def __init__(self, connect: Callable[[str], Sender]) -> None:
        self._connect = connect
        self._senders: dict[str, dict[str, Sender]] = {}

    def get(self, peer: str, address: str) -> Sender:
        """The sender to `address` of `peer`. ConfigError if the address is not valid."""
        senders = self._senders.setdefault(peer, {})
        if address not in senders:
            if len(senders) == _MAX_ADDRESSES:
                raise ConfigError(
                    f"{peer} names more than {_MAX_ADDRESSES} link addresses, which is the limit"
                )
            senders[address] = self._connect(address)
        return senders[address]

    def close(self, peer: str) -> None:
        """Close the senders to `peer`. Pushes that have not ended fail."""
        for sender in self._senders.pop(peer, {}).values():
            sender.close()

    def close_all(self) -> None:
        """Close all senders. Calling it twice is safe."""
        for peer in list(self._senders):
            self.close(peer)
