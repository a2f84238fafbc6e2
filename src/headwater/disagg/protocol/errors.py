"""Errors of connections to peers."""

from headwater.disagg.protocol.push import PushFailure
from headwater.errors import HeadwaterError


class LinkBroken(HeadwaterError):
    """A connection has ended, or its two ends disagree about what was sent, and must be
    closed."""

    def __init__(self, message: str, reason: PushFailure = PushFailure.LOST) -> None:
        super().__init__(message)
        self.reason = reason
        """Failure to report for a push that was in flight on this connection."""


class Malformed(LinkBroken):
    """A peer sent bytes that do not follow the protocol."""
