"""How a connection to a peer fails."""

from headwater.disagg.protocol.push import PushFailure
from headwater.errors import HeadwaterError


class LinkBroken(HeadwaterError):
    """A connection has ended or is out of step, and must be closed."""

    def __init__(self, message: str, reason: PushFailure = PushFailure.LOST) -> None:
        super().__init__(message)
        self.reason = reason
        """What it means for a push that was under way."""


class Malformed(LinkBroken):
    """A peer sent what no peer of ours sends."""
