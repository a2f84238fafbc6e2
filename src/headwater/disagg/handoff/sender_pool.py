"""Ways to the memory of peers: a sender for each place where one receives."""

from collections.abc import Callable

from headwater.disagg.links.interface import Sender
from headwater.errors import ConfigError

_MAX_ADDRESSES = 4
"""Of one connection: a peer receives in one place, and a sender may take memory."""


class SenderPool:
    """Senders by peer and address; made when they are first needed."""

    def __init__(self, connect: Callable[[str], Sender]) -> None:
        self._connect = connect
        self._senders: dict[str, dict[str, Sender]] = {}

    def get(self, peer: str, address: str) -> Sender:
        """The way to where `peer` receives; ConfigError where that is no address."""
        senders = self._senders.setdefault(peer, {})
        if address not in senders:
            if len(senders) == _MAX_ADDRESSES:
                raise ConfigError(f"{peer} receives in more than {_MAX_ADDRESSES} places")
            senders[address] = self._connect(address)
        return senders[address]

    def close(self, peer: str) -> None:
        """No way leads to the memory of `peer` any more; pushes on it have failed."""
        for sender in self._senders.pop(peer, {}).values():
            sender.close()

    def close_all(self) -> None:
        """The same of every peer. Twice is safe."""
        for peer in list(self._senders):
            self.close(peer)
