"""The registered instances of one router: which are alive and may get requests.

All of them serve the same model: the first one defines it, and instances of another model are
refused. After the last one has left, an instance of another model may register.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from headwater.cache import KeyScheme
from headwater.clock import Clock
from headwater.server.errors import RequestRefused
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.protocol import VERSION, Registration

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
        first = next((entry.told for entry in self._instances.values()), None)
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
            if entry.told.role in roles and entry.is_ready(now=now, stale_s=stale_s)
        ]

    def of_epoch(self, epoch: str) -> Instance | None:
        """The instance that was started with this epoch, while it is registered."""
        return next((e for e in self._instances.values() if e.told.epoch == epoch), None)

    def register(self, told: Registration) -> Instance:
        """Register an instance or record its heartbeat. Raises RequestRefused."""
        now = self._clock.now()
        known = self._instances.get(told.instance_id)
        if known is not None and known.told.epoch == told.epoch:
            known.heartbeat(told, now=now)
            return known
        self._check(told, known)
        for other in self.instances:
            if other is known or other.told.url == told.url:
                self._remove(other)
        joined = self._instances[told.instance_id] = Instance(told, now=now)
        self._observer.joined(joined)
        return joined

    def drain(self, name: str) -> Instance | None:
        """Send no new requests to this instance; None when it is not registered."""
        known = self._instances.get(name)
        if known is not None:
            known.is_draining = True
        return known

    def expire(self) -> list[Instance]:
        """Remove the instances whose heartbeat is overdue, and return them."""
        silent_s = self._clock.now() - self._config.forget_s
        expired = [entry for entry in self._instances.values() if entry.seen_s < silent_s]
        for entry in expired:
            self._remove(entry)
        return expired

    def close(self) -> None:
        """Remove all instances."""
        for entry in self.instances:
            self._remove(entry)

    def _remove(self, entry: Instance) -> None:
        del self._instances[entry.name]
        entry.lose()
        self._observer.left(entry)

    def _check(self, told: Registration, known: Instance | None) -> None:
        if told.version != VERSION:
            raise RequestRefused(
                f"this router speaks version {VERSION} of registrations, not {told.version}",
                status=409,
                code="version",
            )
        others = [entry.told for entry in self._instances.values() if entry is not known]
        if others:
            _check_same_model(told, others[0])
        if len(others) >= self._config.max_instances:
            raise RequestRefused(
                f"{len(others)} instances are registered, and no more may be",
                status=409,
                code="too_many",
            )


def _check_same_model(told: Registration, first: Registration) -> None:
    """Blocks of two instances can stand for each other only if everything here is equal."""
    for what, mine, theirs in (
        ("model fingerprint", told.fingerprint[:16], first.fingerprint[:16]),
        ("block size", told.block_tokens, first.block_tokens),
        ("KV format", told.kv_format, first.kv_format),
    ):
        if mine != theirs:
            raise RequestRefused(
                f"{told.instance_id} has the {what} {mine} and this cluster has {theirs}: "
                "every instance of a router must serve the same model in the same way",
                status=409,
                code="fingerprint",
            )
