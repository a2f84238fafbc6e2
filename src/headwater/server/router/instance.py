"""One registered instance: its registration, its cached blocks and its requests."""

import asyncio

from headwater.disagg.routing import Candidate, RecentWork, Trust
from headwater.server.router.cache_view import BlockView
from headwater.server.router.protocol import Registration


class Instance:
    """Used on the router's event loop only. A restarted instance is a new object."""

    def __init__(self, registration: Registration, *, now: float) -> None:
        self.registration = registration
        self.group = registration.group
        """Its model group. Hand-offs, peer reads and continued streams stay within it."""
        self.seen_s = now
        self.view = BlockView(registration.epoch)
        self.recent = RecentWork()
        self.outstanding_tokens = 0
        self.num_alive = 0
        self.is_draining = registration.is_draining
        """It finishes its requests and gets no new ones."""
        self.has_failed = False
        """A request failed on it; it gets no new requests until its next heartbeat."""
        self.was_lost = False
        """It was reported as lost, and has sent no heartbeat since."""
        self.num_gaps = 0
        """Number of gaps in its KV events."""
        self.timeouts: set[asyncio.Timeout] = set()
        """Timeouts of its running requests; they expire at once when the instance is lost."""
        self.is_gone = False
        """It was lost or replaced: requests end as soon as they have sent what they have."""

    @property
    def name(self) -> str:
        return self.registration.instance_id

    @property
    def trust(self) -> Trust:
        """How reliable the view of its cache is."""
        return self.view.trust

    def heartbeat(self, registration: Registration, *, now: float) -> None:
        """Record a heartbeat."""
        self.registration = registration
        self.seen_s = now
        self.has_failed = self.was_lost = False
        self.is_draining |= registration.is_draining

    def is_ready(self, *, now: float, stale_s: float) -> bool:
        """Whether it may get new requests."""
        return not (self.is_draining or self.has_failed) and now - self.seen_s <= stale_s

    def state(self, *, now: float, stale_s: float) -> str:
        """`ready`, `draining` or `lost`, for `/instances`."""
        if self.is_draining:
            return "draining"
        return "ready" if self.is_ready(now=now, stale_s=stale_s) else "lost"

    def candidate(self, cached_tokens: int, *, now: float) -> Candidate:
        """The input of a routing policy, for a prompt with this many cached tokens."""
        return Candidate(
            name=self.name,
            cached_tokens=cached_tokens,
            outstanding_tokens=self.outstanding_tokens,
            recent_tokens=self.recent.tokens(now=now),
            num_alive=max(
                self.num_alive, self.registration.load.running + self.registration.load.waiting
            ),
        )

    def lose(self) -> None:
        """End its running requests at once, so that they continue on another instance."""
        self.is_gone = True
        for scope in [scope for scope in self.timeouts if not scope.expired()]:
            scope.reschedule(asyncio.get_running_loop().time())
