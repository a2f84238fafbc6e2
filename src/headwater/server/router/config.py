"""What an operator may set of a router, checked once."""

from dataclasses import dataclass

from headwater.config import MIB, check_secret, is_loopback
from headwater.disagg.routing import make_policy
from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router."""

    host: str = "127.0.0.1"
    port: int = 8100
    model: str | None = None
    """Model directory whose tokenizer is used; None asks an instance for tokens."""

    policy: str = "cache_aware"
    api_key: str | None = None
    peer_token: str | None = None
    """What instances must show to register, and the router shows to them."""

    prefill_threshold: int = 256
    """Uncached tokens up to which a decode instance prefills a prompt itself."""

    heartbeat_s: float = 1.0
    """How often instances are to say that they live."""

    stale_s: float = 3.0
    """Without a heartbeat for so long, an instance gets no new request …"""

    forget_s: float = 10.0
    """… and for so long, its requests are ended elsewhere and it is forgotten."""

    max_attempts: int = 4
    """Instances that one request may be sent to, one after the other."""

    retry_share: float = 0.2
    """Retries, as a share of requests, that may be made in the long run."""

    connect_timeout_s: float = 2.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 16 * MIB
    max_requests: int = 4096
    """Requests in flight at once; more get a 429."""

    max_instances: int = 1024

    def __post_init__(self) -> None:
        make_policy(self.policy)
        check_secret("--api-key", self.api_key)
        check_secret("--peer-token", self.peer_token)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if not 0 < self.heartbeat_s < self.stale_s < self.forget_s:
            raise ConfigError("heartbeats come more often than instances go stale or are lost")
        if self.prefill_threshold < 0:
            raise ConfigError(
                f"--prefill-threshold cannot be negative, got {self.prefill_threshold}"
            )
        if self.peer_token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets others register instances: give --peer-token"
            )
