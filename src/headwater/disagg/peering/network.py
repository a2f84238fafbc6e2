"""Interface to the control connections of other instances, and the events that they post."""

from typing import NamedTuple, Protocol

from headwater.disagg.protocol.messages import Message, Reason


class PeerMessage(NamedTuple):
    """A message arrived from a peer."""

    peer: str
    """Name of the peer: the address that was given to `send`, or the name of an inbound
    connection."""

    message: Message
    connection: int
    """Number of the connection on which it arrived."""


class PeerLost(NamedTuple):
    """A connection ended, or could not be made. Messages sent on it may be lost."""

    peer: str
    reason: Reason
    connection: int
    """Number of the connection. The next connection to the same peer has another number, so
    this event, which may wait in the inbox, does not end what was sent on the next one."""


class Network(Protocol):
    """Sends messages to peers. Called from the loop's thread; events are posted to its inbox.

    When a connection ends there is exactly one `PeerLost` with its number. A later `send` to
    the same address opens a new connection, on which no message of the old one is delivered.
    """

    def send(self, peer: str, message: Message) -> int:
        """Send without waiting. Connects if `peer` is an address without a connection. Returns
        the number of the connection; 0 if there is none and none can be made."""

    def close(self) -> None:
        """End every connection. Calling it twice is safe."""
