"""Registrations and registries for tests of the router's parts, without sockets."""

from typing import Any

from headwater.clock import Clock
from headwater.server.router.config import RouterConfig
from headwater.server.router.protocol import VERSION, Registration
from headwater.server.router.registry import Registry, RegistryObserver


def make_registration(name: str = "one", *, port: int = 1, **fields: Any) -> Registration:
    """What the instance `name` sends with each heartbeat; `fields` replace the usual values."""
    usual: dict[str, Any] = {
        "epoch": "e",
        "role": "mixed",
        "model": "m",
        "fingerprint": "",
        "block_tokens": 16,
    }
    return Registration(
        version=VERSION,
        instance_id=name,
        url=f"http://127.0.0.1:{port}",
        **(usual | fields),
    )


def make_registry(clock: Clock, config: RouterConfig | None = None) -> Registry:
    """A registry without observers."""
    config = config or RouterConfig(peer_token="t" * 32)
    nothing = RegistryObserver(joined=lambda entry: None, left=lambda entry: None)
    return Registry(config, clock, nothing)
