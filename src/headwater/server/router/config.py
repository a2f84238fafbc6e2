"""Settings of a router, validated once."""

from dataclasses import dataclass, field

from headwater.config import MIB, check_secret
from headwater.disagg.routing import make_policy
from headwater.errors import ConfigError
from headwater.server.config import ConnectionLimits, check_port
from headwater.server.tls import TlsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router."""

    host: str = "127.0.0.1"
    port: int = 8100
    model: str | None = None
    """Model directory whose tokenizer is used; None tokenizes on an instance."""

    policy: str = "cache_aware"
    api_key: str | None = None
    api_keys_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsConfig | None = None
    peer_token: str | None = None
    """Secret that instances present to register, and that the router presents to them."""

    is_insecure: bool = False
    """Accept instances that register without a peer token. For tests on one machine only."""

    prefill_threshold: int = 256
    """Uncached tokens up to which a decode instance prefills a prompt itself."""

    heartbeat_s: float = 1.0
    """Interval between heartbeats of an instance."""

    stale_s: float = 5.0
    """An instance that sends neither a heartbeat nor output for this time gets no new requests.
    A busy machine may delay a few heartbeats; a killed instance is noticed earlier, by its
    closed connections."""

    forget_s: float = 15.0
    """An instance that sends neither a heartbeat nor output for this time is removed, and its
    requests continue on others."""

    sweep_s: float = 0.25
    """Interval of checks for overdue heartbeats."""

    max_attempts: int = 4
    """Maximum number of attempts per request."""

    retry_share: float = 0.2
    """Retries as a share of requests, in the long run."""

    connect_timeout_s: float = 2.0
    drain_timeout_s: float = 30.0
    max_body_bytes: int = 16 * MIB
    max_requests: int = 4096
    """Maximum number of requests in flight; more get a 429."""

    max_instances: int = 1024
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        make_policy(self.policy)
        check_secret("--api-key", self.api_key)
        check_secret("--peer-token", self.peer_token)
        check_port(self.port)
        if not 0 < self.heartbeat_s < self.stale_s < self.forget_s:
            raise ConfigError(
                f"heartbeat_s must be less than stale_s, and stale_s less than forget_s, got {self.heartbeat_s:g}, "
                f"{self.stale_s:g}, {self.forget_s:g}"
            )
        if self.prefill_threshold < 0:
            raise ConfigError(
                f"--prefill-threshold must not be negative, got {self.prefill_threshold}"
            )
        if self.peer_token is None and not self.is_insecure:
            raise ConfigError(
                "a router needs a secret that it shares with its instances, or any process could "
                "register one and receive prompts: set HEADWATER_PEER_TOKEN or give "
                "--peer-token-file FILE (headwater up makes one; --insecure runs without)"
            )
