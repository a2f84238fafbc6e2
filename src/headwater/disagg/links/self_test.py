"""Checks at start that peers can reach this instance at the addresses that it gives them.

A wrong advertised address is otherwise found by the first hand-off, on another machine, as a
push that cannot connect. The test connects to the own address and proves the token, so another
service at that address is found, too.
"""

from collections.abc import Callable

from headwater.clock import Clock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.tcp import TcpDialer
from headwater.disagg.peering.handshake import HandshakeTerms, timeout_check
from headwater.disagg.peering.stream import connect, parse_host_port
from headwater.disagg.peering.tls import open_tls
from headwater.disagg.protocol.errors import LinkBroken
from headwater.errors import ConfigError


def require_reachable_link(
    address: str, config: LinkConfig, block_bytes: int, clock: Clock
) -> None:
    """Raise ConfigError unless this instance's own block receiver answers at `address`."""
    link = address.partition("://")[0]
    if link == "shm":  # a Unix socket of this machine; it has no address to get wrong
        return
    flags = "--link-advertise-host and --link-advertise-port"
    _require(
        f"blocks ({link} link)",
        address,
        flags,
        lambda: _dial(address, config, block_bytes, clock),
    )


def require_reachable_peer(address: str, config: LinkConfig) -> None:
    """Raise ConfigError unless something listens at the control address of this instance."""
    flags = "--peer-advertise-host and --peer-advertise-port"
    target = parse_host_port(f"tcp://{address}")
    _require(
        "control messages",
        address,
        flags,
        lambda: connect(target, config.connect_timeout_s).close(),
    )


def _dial(address: str, config: LinkConfig, block_bytes: int, clock: Clock) -> None:
    target = parse_host_port(address)
    if not address.startswith("tcp://"):
        connect(target, config.connect_timeout_s).close()
        return
    tls = open_tls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    terms = HandshakeTerms("tcp", config.token, block_bytes)
    check_wait = timeout_check(clock, config.connect_timeout_s)
    TcpDialer(address, config, tls).dial(terms, check_wait).stream.close()


def _require(what: str, address: str, flags: str, dial: Callable[[], None]) -> None:
    try:
        dial()
    except LinkBroken as error:
        raise ConfigError(
            f"this instance cannot reach its own address for {what}, {address}, so peers cannot "
            f"either: {error}; set {flags} to the address at which peers reach it"
        ) from error
