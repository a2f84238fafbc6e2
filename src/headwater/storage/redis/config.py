"""Settings of the `redis` backend, and their TLS context."""

import ssl
from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Settings of the `redis` backend."""

    url: str = "redis://127.0.0.1:6379/0"
    """redis://[user:password@]host[:port][/db]; rediss:// for TLS."""

    ttl_s: float | None = None
    """Seconds a block lives after it was last read or written; None leaves it to the server."""

    key_prefix: str = "headwater:"
    """Prefix of the names of blocks on the server."""

    connect_timeout_s: float = 1.0
    """Longest wait for a connection."""

    tls_ca_file: str | None = None
    """Certificate authorities for rediss://; None means those of the system."""

    tls_cert_file: str | None = None
    """Certificate with its chain, for a server that requires one."""

    tls_key_file: str | None = None
    """Private key of that certificate; None if it is in the same file."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ConfigError(f"ttl_s must be positive, got {self.ttl_s}")
        if self.connect_timeout_s <= 0:
            raise ConfigError(
                f"connect_timeout_s must be positive, got {self.connect_timeout_s}"
            )
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file needs tls_cert_file, the certificate of that key")


def tls_context(config: RedisConfig) -> ssl.SSLContext:
    """TLS for rediss://: trusted authorities, and the client certificate."""
    try:
        context = ssl.create_default_context(cafile=config.tls_ca_file)
    except OSError as error:
        raise ConfigError(
            f"tls_ca_file {config.tls_ca_file!r} cannot be used: {error}"
        ) from error
    if config.tls_cert_file is not None:
        try:
            context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
        except OSError as error:
            raise ConfigError(
                f"tls_cert_file {config.tls_cert_file!r} with tls_key_file "
                f"{config.tls_key_file!r} cannot be used: {error}"
            ) from error
    return context
