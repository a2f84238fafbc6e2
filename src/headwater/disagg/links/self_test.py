"""Checks at start that peers can reach this instance at the addresses that it gives them.

A wrong advertised address is otherwise found by the first hand-off, on another machine, as a
push that cannot connect. The test connects to its own address and proves the token, so another
service at that address is detected too. A name that cannot be resolved ends the start. An address
that does not answer is a warning only: behind some NATs a machine cannot reach itself at the
address that others use.
"""

import socket
from collections.abc import Callable

from headwater.clock import Clock
from headwater.disagg.links.auto import remote_part
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.tcp import TcpDialer
from headwater.disagg.peering.handshake import HandshakeTerms, timeout_check
from headwater.disagg.peering.stream import connect, parse_host_port
from headwater.disagg.peering.tls import open_tls
from headwater.disagg.protocol.errors import LinkBroken
from headwater.errors import ConfigError


def check_link(address: str, config: LinkConfig, block_bytes: int, clock: Clock) -> str | None:
    """A warning unless this instance's own block receiver answers at `address`."""
    address = remote_part(address)
    link = address.partition("://")[0]
    if link in ("shm", "cuda"):  # a Unix socket of this machine; no address to get wrong
        return None
    flags = "--link-advertise-host and --link-advertise-port"
    return _check(
        f"blocks ({link} link)",
        address,
        flags,
        lambda: _dial(address, config, block_bytes, clock),
    )


def check_peer(address: str, config: LinkConfig) -> str | None:
    """A warning unless something listens at the control address of this instance."""
    flags = "--peer-advertise-host and --peer-advertise-port"
    target = parse_host_port(f"tcp://{address}")
    return _check(
        "control messages",
        f"tcp://{address}",
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


def _check(what: str, address: str, flags: str, dial: Callable[[], None]) -> str | None:
    host, port = parse_host_port(address)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"the address for {what}, {address}, cannot be resolved: {error}; set {flags} to "
            "the address at which peers reach this instance"
        ) from error
    try:
        dial()
    except LinkBroken as error:
        return (
            f"this instance cannot reach its own address for {what}, {address}: {error}; unless "
            f"a NAT is the reason, peers cannot either: set {flags}"
        )
    return None
