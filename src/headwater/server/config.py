"""Settings of the HTTP server, validated once.

Units are in the names. A value that cannot work raises `ConfigError`.
"""

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from headwater.config import LOG_FORMATS, MIB, check_secret, is_loopback
from headwater.errors import ConfigError
from headwater.server.tls import TlsConfig

_MAX_API_WORKERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections, applied before a request is authenticated."""

    max_connections: int = 4096
    """Maximum number of open connections. The process never uses its last file descriptors for
    them."""

    max_connections_per_address: int = 1024
    """Maximum number of open connections from one client address; loopback is not limited."""

    max_header_bytes: int = 32 * 1024
    """Longest request line and headers of one request."""

    header_timeout_s: float = 10.0
    """Longest time to send the headers of a request. It begins with the connection, and for a later
    request on the same connection with the first byte."""

    body_timeout_s: float = 60.0
    """Longest pause while a body is received."""

    min_body_rate: int = 16 * 1024
    """Slowest average rate in bytes per second of a body, after `body_timeout_s`."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_connections_per_address", "max_header_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits on one request. A request over a limit gets a 4xx."""

    max_body_bytes: int = 16 * MIB
    """Longest request body."""

    max_prompts: int = 256
    """Maximum number of prompts in one completion request."""

    max_choices: int = 64
    """Maximum number of choices (`n`) per prompt."""

    max_stop_strings: int = 16
    """Maximum number of stop strings per request."""

    max_stop_chars: int = 256
    """Longest stop string."""

    max_stop_token_ids: int = 128
    """Maximum number of stop token ids per request."""

    max_logprobs: int = 20
    """Maximum number of alternatives reported per token."""

    max_logit_bias: int = 1024
    """Maximum number of entries of `logit_bias`."""

    max_queued: int = 1024
    """Maximum number of waiting sequences in addition to the running ones; further ones get a
    429."""

    max_stored_responses: int = 1024
    """Maximum number of responses kept for `previous_response_id`; 0 keeps none."""

    max_stored_bytes: int = 128 * MIB
    """Maximum memory for stored responses."""

    stored_lifetime_s: float = 3600.0
    """Time a stored response is kept."""

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(
                f"--max-body-mib must be positive, got {self.max_body_bytes / MIB}"
            )
        if self.max_queued < 0:
            raise ConfigError(
                f"--max-queued-requests must not be negative, got {self.max_queued}"
            )
        if self.max_stored_responses < 0:
            raise ConfigError(
                f"--max-stored-responses must not be negative, got {self.max_stored_responses}"
            )
        if self.stored_lifetime_s <= 0:
            raise ConfigError(
                f"--stored-response-lifetime must be positive, got {self.stored_lifetime_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP process."""

    host: str = "127.0.0.1"
    """Address to bind; loopback by default."""

    port: int = 8000
    """Port to bind; 0 takes a free one."""

    served_model_name: str | None = None
    """Model name for clients; None means the last part of the model's path."""

    api_key: str | None = None
    """Key with all scopes that every request but `GET /health` must carry."""

    api_keys_file: str | None = None
    """File with several keys, their scopes and limits; see `keys`."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names in the `Host` header, in addition to loopback names and the bound
    address."""

    tls: TlsConfig | None = None
    """Serve HTTPS; None serves HTTP."""

    drain_timeout_s: float = 30.0
    """Time that running requests get to finish when the server is stopped."""

    start_timeout_s: float = 600.0
    """Time the engine may take to load its model."""

    api_workers: int = 1
    """HTTP worker processes on the port."""

    max_engine_restarts: int = 3
    """Maximum number of restarts of a dead engine within 10 minutes; then the server exits with
    1."""

    vllm_metric_names: bool = False
    """Also expose the metrics that routers scrape under the `vllm:` prefix."""

    key_metrics: bool = False
    """Count requests and tokens by the name of their key."""

    routers: tuple[str, ...] = ()
    """URLs of the routers to register at."""

    instance_name: str | None = None
    """Name at the router; None means host and port."""

    peer_token: str | None = None
    """Secret shared by the router and the instances of one cluster."""

    tool_call_parser: str = "auto"
    """Format of the model's tool calls: a name, `module:Class`, `auto` for the format of its
    chat template, or `none`."""

    reasoning_parser: str = "auto"
    """Tags around the model's reasoning: a name, `auto` for those of its chat template, or
    `none`."""

    log_format: Literal["text", "json"] = "text"
    """Format of log lines; `json` adds one line per finished request."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    def __post_init__(self) -> None:
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                f"--log-format must be one of {', '.join(LOG_FORMATS)}; got {self.log_format!r}"
            )
        check_port(self.port)
        check_secret("--api-key", self.api_key)
        check_secret("--peer-token", self.peer_token)
        for url in self.routers:
            _check_router_url(url)
        if self.instance_name is not None and not _NAME.fullmatch(self.instance_name):
            raise ConfigError(
                f"--instance-name must have 1 to 64 letters, digits, dots and dashes, got "
                f"{self.instance_name!r}"
            )
        if len(set(self.routers)) < len(self.routers):
            raise ConfigError(
                f"--router names a router twice, leave one out: {', '.join(self.routers)}"
            )
        if not 1 <= self.api_workers <= _MAX_API_WORKERS:
            raise ConfigError(
                f"--api-workers must be between 1 and {_MAX_API_WORKERS}, got {self.api_workers}"
            )
        if self.max_engine_restarts < 0:
            raise ConfigError(
                f"--max-engine-restarts must not be negative, got {self.max_engine_restarts}"
            )
        if self.drain_timeout_s < 0:
            raise ConfigError(
                f"--drain-timeout must not be negative, got {self.drain_timeout_s}"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    @property
    def needs_key(self) -> bool:
        """Whether clients must present an API key."""
        return self.api_key is not None or self.api_keys_file is not None


def is_clear_text(url: str) -> bool:
    """Whether other hosts can read what is sent to `url`."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def check_port(port: int) -> None:
    """Raise ConfigError for a number that is not a port."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {port}")


def _check_router_url(url: str) -> None:
    """Raise ConfigError for a router URL that cannot be used."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--router must be a URL such as http://127.0.0.1:8100, got {url!r}")
