"""What hand-offs need from outside. Tests and the simulator pass their own implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwater.disagg.links.interface import Receiver, Sender
from headwater.disagg.peering.network import Network
from headwater.types import Slots


class Memory(Protocol):
    """Device blocks that a link may write while the runner does not know it."""

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
    ConfigError where the address is not valid."""

    memory: Memory
    new_id: Callable[[], int]
    """Makes a random number of 63 bits. It must not be guessable: it names a lease."""
