"""Senders to peers, one for each address at which a peer receives blocks."""

from collections.abc import Callable

from headwater.disagg.links.interface import Sender
from headwater.errors import ConfigError

_MAX_ADDRESSES = 4
"""Most addresses of one connection. A peer has one receiver, and each sender takes memory."""


class SenderPool:
    """Senders by peer and address, made on first use."""

    def __init__(self, connect: Callable[[str], Sender]) -> None:
        self._connect = connect
        self._senders: dict[str, dict[str, Sender]] = {}

    def get(self, peer: str, address: str) -> Sender:
        """The sender to `address` of `peer`. ConfigError where the address is not valid."""
        senders = self._senders.setdefault(peer, {})
        if address not in senders:
            if len(senders) == _MAX_ADDRESSES:
                raise ConfigError(f"{peer} names more than {_MAX_ADDRESSES} link addresses")
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
