"""The handshake: both ends prove the token and agree on version and block size, or disconnect."""

import dataclasses
import socket
from threading import Thread

import pytest

from headwater.clock import SystemClock
from headwater.disagg.links import receiver as receiver_module
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.peering import handshake
from headwater.disagg.peering.handshake import (
    HandshakeResult,
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    client_handshake,
    timeout_check,
)
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError
from headwater.testing.link_contract import open_harness
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.wire import CONFIG, WIRE_LINKS, MakeLinks, dialer

OURS = HandshakeTerms("tcp", b"a token of tests", 4096)


def meet(
    sender: HandshakeTerms, receiver: HandshakeTerms, grant: bytes = b""
) -> tuple[object, object]:
    """The result of a handshake at each end: a session or an error."""
    near, far = (Stream(end) for end in socket.socketpair())
    ends: dict[str, object] = {}

    def handshake() -> None:
        try:
            met = ServerHandshake(far, receiver, timeout_check(SystemClock(), 2.0))
            ends["receiver"] = met.accept(grant)
        except LinkBroken as error:
            ends["receiver"] = error
        far.shut()

    thread = Thread(target=handshake)
    thread.start()
    try:
        ends["sender"] = client_handshake(near, sender, timeout_check(SystemClock(), 2.0))
    except LinkBroken as error:
        ends["sender"] = error
    thread.join(5.0)
    near.close()
    far.close()
    return ends["sender"], ends["receiver"]


def test_both_ends_get_one_key_and_the_grant():
    """The key is new for each connection."""
    near, far = meet(OURS, OURS, b"a grant")
    again, _ = meet(OURS, OURS, b"a grant")

    assert isinstance(near, LinkSession)
    assert isinstance(again, LinkSession)
    assert near == far
    assert near.grant == b"a grant"
    assert near.key != again.key


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"token": b"another token"}, "token is another one"),
        ({"block_bytes": 8192}, "block size is another one"),
        ({"link": "shm"}, "another link"),
    ],
)
def test_a_mismatch_is_refused_with_a_reason(change, sentence):
    """The receiver answers with the reason and ends the connection (lesson 66)."""
    near, far = meet(OURS._replace(**change), OURS)

    assert isinstance(near, LinkBroken)
    assert isinstance(far, LinkBroken)
    assert sentence in str(near)
    assert near.reason is PushFailure.REFUSED


def test_a_receiver_of_the_first_version_is_refused():
    """Version 1 sent the checksum of a block before the block, so such a receiver would accept
    none of our blocks."""
    near, far = (Stream(end) for end in socket.socketpair())
    challenge = handshake._CHALLENGE.pack(handshake._MAGIC, 1, 0, bytes(32))
    far.send([challenge], timeout_check(SystemClock(), 2.0))

    with pytest.raises(LinkBroken, match="protocol version"):
        client_handshake(near, OURS, timeout_check(SystemClock(), 2.0))
    near.close()
    far.close()


def test_a_sender_of_the_first_version_is_refused():
    """The old sender is told why, instead of waiting for an answer to its first frame."""
    near, far = (Stream(end) for end in socket.socketpair())
    check_wait = timeout_check(SystemClock(), 2.0)
    answer = (handshake._MAGIC, 1, b"tcp\0\0\0", OURS.block_bytes, bytes(32), bytes(32))
    near.send([handshake._ANSWER.pack(*answer)], check_wait)

    with pytest.raises(Malformed, match="version"):
        ServerHandshake(far, OURS, check_wait)
    challenge = handshake._take(near, handshake._CHALLENGE.size, check_wait)
    result = handshake._take(near, handshake._WELCOME.size, check_wait)
    assert challenge.startswith(handshake._MAGIC)
    assert handshake._WELCOME.unpack(result)[0] == HandshakeResult.VERSION
    near.close()
    far.close()


def test_a_receiver_without_the_token_gets_no_bytes():
    """A receiver that accepts everything is not trusted."""
    near, far = (Stream(end) for end in socket.socketpair())
    check_wait = timeout_check(SystemClock(), 2.0)
    version = handshake.VERSION
    challenge = handshake._CHALLENGE.pack(handshake._MAGIC, version, 0, bytes(32))
    welcome = handshake._WELCOME.pack(HandshakeResult.WELCOME, 0, bytes(32))
    far.send([challenge, welcome], check_wait)

    with pytest.raises(LinkBroken, match="has another token"):
        client_handshake(near, OURS, check_wait)
    near.close()
    far.close()


@pytest.mark.parametrize("link", WIRE_LINKS)
def test_a_wrong_token_fails_the_push_and_no_other(link):
    """The outcome gives the reason, and another sender still connects."""
    with open_harness(MakeLinks(link), link, 4096) as harness:
        harness.receiver.open(1, [0])
        wrong = dataclasses.replace(CONFIG, token=b"guessed")
        with pytest.raises(LinkBroken, match="token is another one"):
            dialer(harness.receiver.address, wrong).dial(
                HandshakeTerms(link, wrong.token, 4096), timeout_check(SystemClock(), 2.0)
            )
        harness.sender().push(harness.push(1, 1, [0]))

        assert harness.done(1) == 4096


def test_silent_unauthenticated_connections_are_dropped():
    """Silent connections are closed after the handshake timeout, and a sender still connects
    (lesson 68)."""
    with open_harness(MakeLinks("tcp"), "tcp", 4096) as harness:
        host, _, port = harness.receiver.address.removeprefix("tcp://").rpartition(":")
        unauthenticated = [socket.create_connection((host, int(port)), 5.0) for _ in range(40)]
        for stranger in unauthenticated:
            while stranger.recv(64):
                pass  # the challenge, then the end
            stranger.close()
        harness.receiver.open(1, [0])
        harness.sender().push(harness.push(1, 1, [0]))

        assert harness.done(1) == 4096


def test_many_unauthenticated_connections_keep_no_sender_out(monkeypatch):
    """The oldest connection without a handshake is closed for the newest one."""
    monkeypatch.setattr(receiver_module, "_MAX_UNAUTHENTICATED", 4)
    patient = dataclasses.replace(CONFIG, connect_timeout_s=60.0)
    make = lambda memory, deliver: Links(patient, memory, deliver)  # noqa: E731
    with open_harness(make, "tcp", 4096) as harness:
        host, _, port = harness.receiver.address.removeprefix("tcp://").rpartition(":")
        strangers = [socket.create_connection((host, int(port)), 5.0) for _ in range(8)]
        harness.receiver.open(1, [0])
        harness.sender().push(harness.push(1, 1, [0]))

        assert harness.done(1) == 4096
        for stranger in strangers:
            stranger.close()


def test_mistakes_of_the_operator_are_reported_at_once():
    """Examples are a missing token, an unknown link, an invalid address and a port in use
    (lessons 60, 61)."""
    memory, log = BlockArray(1, 64), EventLog()
    links = Links(CONFIG, memory, log)
    with pytest.raises(ConfigError, match="token"):
        LinkConfig(token=b"")
    with pytest.raises(ConfigError, match="known: auto, tcp, shm, cuda, mooncake"):
        links.listen("pigeon")
    for address in ("pigeon://loft", "tcp://", "tcp://host:port", "shm://", "cuda://"):
        with pytest.raises(ConfigError, match="not a link address"):
            links.connect(address)
    taken = links.listen("tcp")
    port = int(taken.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        Links(dataclasses.replace(CONFIG, port=port), memory, log).listen("tcp")
    taken.close()
