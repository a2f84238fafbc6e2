"""The registered instances of one router: which are alive and may get requests.

All of them serve the same model: the first one defines it, and instances of another model are
refused. After the last one has left, an instance of another model may register.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from headwater.cache import KeyScheme
from headwater.clock import Clock
from headwater.server.errors import RequestRefused
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.protocol import VERSION, Registration

log = logging.getLogger(__name__)

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

    @property
    def instances(self) -> list[Instance]:
        """All instances, oldest first."""
        return list(self._instances.values())

    @property
    def scheme(self) -> KeyScheme | None:
        """The block key scheme of this cluster; None without instances."""
        first = next((entry.registration for entry in self._instances.values()), None)
        if first is None:
            return None
        return KeyScheme(
            block_tokens=first.block_tokens,
            fingerprint=bytes.fromhex(first.fingerprint),
            kv_format=first.kv_format,
        )

    def ready(self, roles: Collection[str]) -> list[Instance]:
        """Instances of these roles that may get a request now."""
        now, stale_s = self._clock.now(), self._config.stale_s
        return [
            entry
            for entry in self._instances.values()
            if entry.registration.role in roles and entry.is_ready(now=now, stale_s=stale_s)
        ]

    def of_epoch(self, epoch: str) -> Instance | None:
        """The instance that was started with this epoch, while it is registered."""
        return next(
            (e for e in self._instances.values() if e.registration.epoch == epoch), None
        )

    def register(self, registration: Registration) -> Instance:
        """Register an instance or record its heartbeat. Raises RequestRefused."""
        now = self._clock.now()
        known = self._instances.get(registration.instance_id)
        if known is not None and known.registration.epoch == registration.epoch:
            if known.was_lost:
                log.warning("instance is back: name=%s url=%s", known.name, registration.url)
            known.heartbeat(registration, now=now)
            return known
        self._check(registration, known)
        for other in self.instances:
            if other is known or other.registration.url == registration.url:
                self._remove(other)
        joined = self._instances[registration.instance_id] = Instance(registration, now=now)
        log.info(
            "instance registered: name=%s role=%s url=%s restarted=%s",
            *(joined.name, registration.role, registration.url, known is not None),
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
        self._report_lost()
        silent_s = self._clock.now() - self._config.forget_s
        expired = [entry for entry in self._instances.values() if entry.seen_s < silent_s]
        for entry in expired:
            log.warning(
                "instance removed, no heartbeat: name=%s silent_s=%.1f",
                *(entry.name, self._clock.now() - entry.seen_s),
            )
            self._remove(entry)
        return expired

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
        others = [
            entry.registration for entry in self._instances.values() if entry is not known
        ]
        if others and not _is_same_model(registration, others[0]):
            # The response names no value: a sender must not learn which model is served.
            raise RequestRefused(
                "this instance differs from the cluster in model weights, block size or KV "
                "format; start it with the model and settings of the other instances",
                status=409,
                code="fingerprint",
            )
        if len(others) >= self._config.max_instances:
            raise RequestRefused(
                f"{len(others)} instances are registered, which is the limit; start another router",
                status=409,
                code="too_many",
            )


def _is_same_model(one: Registration, other: Registration) -> bool:
    """Whether blocks of the two instances are interchangeable."""
    return (
        one.fingerprint == other.fingerprint
        and one.block_tokens == other.block_tokens
        and one.kv_format == other.kv_format
    )
