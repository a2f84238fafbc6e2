"""One instance as the router knows it: what it said of itself, its cache, its requests."""

import asyncio

from headwater.disagg.routing import Candidate, RecentWork, Trust
from headwater.server.router.messages import Registration
from headwater.server.router.view import BlockView


class Instance:
    """Belongs to the router's event loop. A restart of the real one makes a new object."""

    def __init__(self, told: Registration, *, now: float) -> None:
        self.told = told
        self.seen_s = now
        self.view = BlockView(told.epoch)
        self.recent = RecentWork()
        self.outstanding_tokens = 0
        self.num_alive = 0
        self.is_draining = told.is_draining
        """Told to go: it ends what it has, and gets nothing new."""
        self.has_failed = False
        """A request could not reach it; until its next heartbeat nobody else tries."""
        self.num_gaps = 0
        """Times that events were missed, and asked for."""
        self.scopes: set[asyncio.Timeout] = set()
        """Of the requests it has: ended early when the instance is lost."""

    @property
    def name(self) -> str:
        return self.told.instance_id

    @property
    def trust(self) -> Trust:
        """How far the view of its cache can be relied on."""
        return self.view.trust

    def heartbeat(self, told: Registration, *, now: float) -> None:
        """It lives, and says how busy it is."""
        self.told = told
        self.seen_s = now
        self.has_failed = False
        self.is_draining |= told.is_draining

    def is_ready(self, *, now: float, stale_s: float) -> bool:
        """Whether it may get a new request."""
        return not (self.is_draining or self.has_failed) and now - self.seen_s <= stale_s

    def state(self, *, now: float, stale_s: float) -> str:
        """One word for people."""
        if self.is_draining:
            return "draining"
        return "ready" if self.is_ready(now=now, stale_s=stale_s) else "lost"

    def candidate(self, cached_blocks: int, *, now: float) -> Candidate:
        """What a policy may know of it, for a prompt of which it has so many blocks."""
        return Candidate(
            name=self.name,
            cached_tokens=cached_blocks * self.told.block_tokens,
            outstanding_tokens=self.outstanding_tokens,
            recent_tokens=self.recent.tokens(now=now),
            num_alive=max(self.num_alive, self.told.load.running + self.told.load.waiting),
        )

    def lose(self) -> None:
        """End every request it has: whoever waits for it learns so at once."""
        for scope in [scope for scope in self.scopes if not scope.expired()]:
            scope.reschedule(asyncio.get_running_loop().time())
