"""The seam to other instances' control messages, and the events that come back through it."""

from typing import NamedTuple, Protocol

from headwater.disagg.protocol.messages import Message, Reason


class PeerMessage(NamedTuple):
    """A peer said something."""

    peer: str
    """The name of a connection: the address that was given to `send`, or one of theirs."""

    message: Message


class PeerLost(NamedTuple):
    """A connection ended, or could not be made. Nothing sent on it is to be counted on."""

    peer: str
    reason: Reason


class Network(Protocol):
    """Sends messages to peers. Called from the loop's thread; events are posted to its inbox.

    A connection is one life: when it ends there is exactly one `PeerLost`, and a later `send`
    to the same address opens another, on which nothing of the first one is delivered.
    """

    def send(self, peer: str, message: Message) -> None:
        """Send without waiting; connects where `peer` is an address that is not connected."""

    def close(self) -> None:
        """End every connection. Twice is safe."""
