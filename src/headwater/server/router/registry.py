"""The registered instances of one router: which are alive and may get requests.

They form groups by model fingerprint, KV format, block size and version (`ModelGroup`). A cluster
has one group; while it is upgraded instance by instance it has two, and new requests move with
the instances.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headwater.clock import Clock
from headwater.engine.client import server_of
from headwater.server.errors import RequestRefused
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.protocol import VERSION, Registration

log = logging.getLogger(__name__)

MAX_GROUPS = 4
"""Maximum number of groups at once. An upgrade has two; more than a few are a mistake."""

_MAX_LOST = 64
_SHOW_LOST_S = 600.0
"""How long a lost instance is shown, unless an instance registers under its name."""

SERVING = frozenset({"mixed", "decode"})
"""Roles that take requests over HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryObserver:
    """Called when an instance joins or leaves."""

    joined: Callable[[Instance], None]
    left: Callable[[Instance], None]


class Registry:
    """Owns the instances by name."""

    def __init__(self, config: RouterConfig, clock: Clock, observer: RegistryObserver) -> None:
        self._config = config
        self._clock = clock
        self._observer = observer
        self._instances: dict[str, Instance] = {}
        self._lost: deque[Instance] = deque(maxlen=_MAX_LOST)
        self._swept_s = clock.now()

    @property
    def instances(self) -> list[Instance]:
        """All instances, oldest first."""
        return list(self._instances.values())

    @property
    def lost(self) -> list[Instance]:
        """Instances that were removed recently because they sent no heartbeat, newest first."""
        oldest_s = self._clock.now() - _SHOW_LOST_S
        return [entry for entry in self._lost if entry.seen_s >= oldest_s]

    @property
    def num_groups(self) -> int:
        """Number of groups with at least one registered instance."""
        return len({entry.group for entry in self._instances.values()})

    def ready(self, roles: Collection[str]) -> list[Instance]:
        """Instances of these roles that may get a request now."""
        now, stale_s = self._clock.now(), self._config.stale_s
        return [
            entry
            for entry in self._instances.values()
            if entry.registration.role in roles and entry.is_ready(now=now, stale_s=stale_s)
        ]

    def of_server(self, server_id: str) -> Instance | None:
        """The instance of the server with this id, while it is registered."""
        return next(
            (
                e
                for e in self._instances.values()
                if server_of(e.registration.epoch) == server_id
            ),
            None,
        )

    def is_away(self, server_id: str) -> bool:
        """Whether the instance of this server was lost recently: its engine may be
        restarting."""
        return any(server_of(e.registration.epoch) == server_id for e in self.lost)

    def register(self, registration: Registration) -> Instance:
        """Register an instance or record its heartbeat. Raises RequestRefused."""
        now = self._clock.now()
        known = self._instances.get(registration.instance_id)
        if known is not None and _is_heartbeat(registration, known):
            if known.was_lost:
                log.warning("instance is back: name=%s url=%s", known.name, registration.url)
            known.heartbeat(registration, now=now)
            return known
        self._check(registration, known)
        for other in self.instances:
            if other is known or other.registration.url == registration.url:
                self._remove(other)
        for entry in [e for e in self._lost if e.name == registration.instance_id]:
            self._lost.remove(entry)
        joined = self._instances[registration.instance_id] = Instance(registration, now=now)
        log.info(
            "instance registered: name=%s role=%s url=%s restarted=%s group=%s groups=%d",
            *(joined.name, registration.role, registration.url, known is not None),
            *(joined.group.label, self.num_groups),
        )
        self._observer.joined(joined)
        return joined

    def drain(self, name: str) -> Instance | None:
        """Send no new requests to this instance; None when it is not registered."""
        known = self._instances.get(name)
        if known is not None:
            log.info("instance drains: name=%s", name)
            known.is_draining = True
        return known

    def expire(self) -> list[Instance]:
        """Remove the instances whose heartbeat is overdue, and return them."""
        self._forgive_own_pause()
        self._report_lost()
        silent_s = self._clock.now() - self._config.forget_s
        expired = [entry for entry in self._instances.values() if entry.seen_s < silent_s]
        for entry in expired:
            self._remove(entry)
            if entry.is_draining:
                log.info("instance removed, drained: name=%s", entry.name)
                continue
            log.warning(
                "instance removed, no heartbeat: name=%s silent_s=%.1f",
                *(entry.name, self._clock.now() - entry.seen_s),
            )
            self._lost.appendleft(entry)
        return expired

    def _forgive_own_pause(self) -> None:
        """Do not count the time in which the router was stopped or had no processor as silence
        of the instances: it could not receive heartbeats then."""
        now = self._clock.now()
        paused_s = now - self._swept_s - self._config.sweep_s
        if paused_s > self._config.heartbeat_s:
            log.warning("router was paused: paused_s=%.1f", paused_s)
            for entry in self._instances.values():
                entry.seen_s = min(now, entry.seen_s + paused_s)
        self._swept_s = now

    def _report_lost(self) -> None:
        """Log each instance that stopped answering, once until its next heartbeat."""
        now = self._clock.now()
        for entry in self._instances.values():
            is_lost = entry.state(now=now, stale_s=self._config.stale_s) == "lost"
            if is_lost and not entry.was_lost:
                entry.was_lost = True
                log.warning(
                    "instance lost: name=%s reason=%s silent_s=%.1f running=%d",
                    *(entry.name, "request failed" if entry.has_failed else "no heartbeat"),
                    *(now - entry.seen_s, entry.num_alive),
                )

    def close(self) -> None:
        """Remove all instances."""
        for entry in self.instances:
            self._remove(entry)

    def _remove(self, entry: Instance) -> None:
        del self._instances[entry.name]
        entry.lose()
        self._observer.left(entry)

    def _check(self, registration: Registration, known: Instance | None) -> None:
        if registration.version != VERSION:
            raise RequestRefused(
                f"the registration has version {registration.version} and this router needs {VERSION}; "
                "use the same Headwater version for router and instances",
                status=409,
                code="version",
            )
        num_others = len(self._instances) - (known is not None)
        if num_others >= self._config.max_instances:
            raise RequestRefused(
                f"{num_others} instances are registered, which is the limit; start another router",
                status=409,
                code="too_many",
            )
        groups = {entry.group for entry in self._instances.values() if entry is not known}
        if registration.group not in groups and len(groups) >= MAX_GROUPS:
            # The response names no value: a sender must not learn which model is served.
            raise RequestRefused(
                f"instances of {len(groups)} different models or versions are registered, which "
                "is the limit; stop old ones first",
                status=409,
                code="too_many_groups",
            )


def _is_heartbeat(registration: Registration, known: Instance) -> bool:
    """Whether `registration` comes from the same start of the instance as `known`."""
    return known.registration.epoch == registration.epoch and known.group == registration.group
