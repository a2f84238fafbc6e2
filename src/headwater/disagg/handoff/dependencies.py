"""What carries out the decisions about hand-offs; others are given in tests and simulations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwater.disagg.links.interface import Receiver, Sender
from headwater.disagg.peering.network import Network
from headwater.types import Slots


class Memory(Protocol):
    """The device's blocks, which a link writes to behind the runner's back."""

    @property
    def block_bytes(self) -> int: ...

    def mark_written(self, slots: Slots) -> None:
        """Bytes have landed in `slots`: whatever was derived from them is stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffDependencies:
    """All that one instance's hand-offs need from outside."""

    network: Network
    receiver: Receiver
    connect: Callable[[str], Sender]
    """A way to the receiver at an address, made without waiting for it; ConfigError where that
    is no address."""

    memory: Memory
    new_id: Callable[[], int]
    """Returns random numbers of 63 bits, which cannot be guessed."""
