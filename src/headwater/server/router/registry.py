"""The instances of one cluster: who registered, who is alive, who may get requests.

All of them serve one model: the first decides which, and who has another is refused. When the
last one has gone, the next may bring another.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from headwater.cache import KeyScheme
from headwater.clock import Clock
from headwater.server.errors import RequestRefused
from headwater.server.router.config import RouterConfig
from headwater.server.router.instance import Instance
from headwater.server.router.messages import VERSION, Registration

SERVING = frozenset({"mixed", "decode"})
"""Roles that take requests over HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Told when the instances change, so that each is followed exactly while it is known."""

    joined: Callable[[Instance], None]
    left: Callable[[Instance], None]


class Registry:
    """Owns the instances, by name."""

    def __init__(self, config: RouterConfig, clock: Clock, watch: Watch) -> None:
        self._config = config
        self._clock = clock
        self._watch = watch
        self._instances: dict[str, Instance] = {}

    @property
    def instances(self) -> list[Instance]:
        """Everybody who is known, oldest first."""
        return list(self._instances.values())

    @property
    def scheme(self) -> KeyScheme | None:
        """How blocks are named in this cluster; None while there is nobody."""
        told = next((entry.told for entry in self._instances.values()), None)
        if told is None:
            return None
        return KeyScheme(
            block_tokens=told.block_tokens,
            fingerprint=bytes.fromhex(told.fingerprint),
            kv_format=told.kv_format,
        )

    def ready(self, roles: Collection[str]) -> list[Instance]:
        """Those of these roles that may get a request now."""
        now, stale_s = self._clock.now(), self._config.stale_s
        return [
            entry
            for entry in self._instances.values()
            if entry.told.role in roles and entry.is_ready(now=now, stale_s=stale_s)
        ]

    def register(self, told: Registration) -> Instance:
        """A registration or a heartbeat; raises Refused with a sentence for what cannot join."""
        now = self._clock.now()
        known = self._instances.get(told.instance_id)
        if known is not None and known.told.epoch == told.epoch:
            known.heartbeat(told, now=now)
            return known
        self._check(told, known)
        for other in self.instances:
            if other is known or other.told.url == told.url:
                self._forget(other)
        joined = self._instances[told.instance_id] = Instance(told, now=now)
        self._watch.joined(joined)
        return joined

    def drain(self, name: str) -> Instance | None:
        """Send nothing new to this instance; None where there is none of that name."""
        known = self._instances.get(name)
        if known is not None:
            known.is_draining = True
        return known

    def expire(self) -> list[Instance]:
        """Forget those who have been silent too long, and return them."""
        silent_s = self._clock.now() - self._config.forget_s
        gone = [entry for entry in self._instances.values() if entry.seen_s < silent_s]
        for entry in gone:
            self._forget(entry)
        return gone

    def close(self) -> None:
        """Forget everybody."""
        for entry in self.instances:
            self._forget(entry)

    def _forget(self, entry: Instance) -> None:
        del self._instances[entry.name]
        entry.lose()
        self._watch.left(entry)

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
