"""Addresses that peers are given: their own flags, and a test at start that they work."""

import socket
from dataclasses import replace

import pytest

from headwater.cli.parser import build_parser
from headwater.clock import SystemClock
from headwater.config import PeersConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.links.self_test import check_link, check_peer
from headwater.errors import ConfigError
from headwater.launch.peers import _link_config, _peer_config
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.wire import CONFIG


def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("link", ["tcp", "shm"])
def test_a_receiver_that_peers_can_reach_passes(link):
    """The instance connects to its own address and proves the token."""
    receiver = Links(CONFIG, BlockArray(1, 64), EventLog()).listen(link)
    assert check_link(receiver.address, CONFIG, 64, SystemClock()) is None
    receiver.close()


def test_an_address_for_blocks_at_which_nothing_listens_is_a_warning():
    """The message names the address and the flags that set it."""
    config = replace(CONFIG, advertised_port=closed_port())
    receiver = Links(config, BlockArray(1, 64), EventLog()).listen("tcp")
    warning = check_link(receiver.address, config, 64, SystemClock())
    assert warning is not None
    assert "--link-advertise-host and --link-advertise-port" in warning
    receiver.close()


def test_an_address_of_another_service_is_a_warning():
    """Another service at the address accepts connections, but is not the receiver of this
    instance."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = replace(CONFIG, advertised_port=other.getsockname()[1], connect_timeout_s=0.2)
        receiver = Links(config, BlockArray(1, 64), EventLog()).listen("tcp")
        warning = check_link(receiver.address, config, 64, SystemClock())
        assert "cannot reach its own address" in (warning or "")
        receiver.close()


def test_an_address_for_control_at_which_nothing_listens_is_a_warning():
    """The warning has the address for control messages and its flags."""
    assert "--peer-advertise-host" in (check_peer(f"127.0.0.1:{closed_port()}", CONFIG) or "")


def test_an_address_that_is_no_name_is_refused_at_start():
    """A NAT may keep an instance from reaching its own address, so that is a warning. A name
    that cannot be resolved is always wrong."""
    with pytest.raises(ConfigError, match="cannot be resolved"):
        check_peer("no.such.host.invalid:7", CONFIG)


def test_every_address_of_the_machine_is_no_address_for_peers():
    """Listening on 0.0.0.0 needs an advertised address."""
    everywhere = replace(CONFIG, host="0.0.0.0")
    with pytest.raises(ConfigError, match="every address of this machine"):
        Links(everywhere, BlockArray(1, 64), EventLog()).listen("tcp")
    named = replace(everywhere, advertised_host="127.0.0.1")
    receiver = Links(named, BlockArray(1, 64), EventLog()).listen("tcp")
    assert receiver.address.startswith("tcp://127.0.0.1:")
    receiver.close()


def test_control_and_blocks_have_their_own_addresses():
    """`serve` has flags for binding and advertising, with the defaults that most users need."""
    peers = PeersConfig(host="10.0.0.1", port=1, advertise_host="p.example", advertise_port=2)
    link = _link_config(peers, b"token")
    control = _peer_config(peers, b"token", b"i", 64)
    assert (link.host, link.port, link.advertised_host) == ("10.0.0.1", 0, "p.example")
    assert (control.advertised_host, control.advertised_port) == ("p.example", 2)

    peers = replace(peers, link_host="10.0.0.2", link_port=3, link_advertise_port=4)
    link = _link_config(replace(peers, link_advertise_host="b.example"), b"token")
    assert (link.host, link.port) == ("10.0.0.2", 3)
    assert (link.advertised_host, link.advertised_port) == ("b.example", 4)


def test_serve_has_a_flag_for_each_address():
    """There are flags for control and for blocks, to bind and to advertise."""
    given = []
    for flag, value in (
        ("--peer-host", "10.0.0.1"),
        ("--peer-port", "1"),
        ("--peer-advertise-host", "p.example"),
        ("--peer-advertise-port", "2"),
        ("--link-host", "10.0.0.2"),
        ("--link-port", "3"),
        ("--link-advertise-host", "b.example"),
        ("--link-advertise-port", "4"),
    ):
        given += [flag, value]
    options = build_parser().parse_args(["serve", *given])

    assert options.link_advertise_host == "b.example"
    assert options.peer_advertise_port == 2
