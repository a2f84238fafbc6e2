"""The interface through which the engine loop publishes KV events."""

from collections.abc import Sequence
from typing import Protocol

from headwater.events import CacheEvent


class Feed(Protocol):
    """Publishes KV events to subscribers. Called from the loop's thread; never waits."""

    @property
    def snapshot_wanted(self) -> bool:
        """Whether a subscriber asked for a snapshot of everything cached."""

    def publish(self, changes: Sequence[CacheEvent]) -> None:
        """Publish what changed, in order."""

    def publish_snapshot(self, changes: Sequence[CacheEvent]) -> None:
        """Publish all cached blocks, after every change published before."""

    def close(self) -> None:
        """Stop publishing. Calling it twice is safe."""
