"""Control connections: which peers are accepted, what ends a connection, and limits."""

import json
import socket
import struct
from contextlib import closing
from queue import Empty, SimpleQueue
from threading import enumerate as threads
from typing import Any

import pytest

from headwater.clock import SystemClock
from headwater.disagg.peering.authenticated import AuthenticatedFrames
from headwater.disagg.peering.handshake import HandshakeTerms, client_handshake, timeout_check
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.peering.service import PeerConfig, PeerService
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.codec import MAX_BODY_BYTES
from headwater.disagg.protocol.errors import Malformed
from headwater.disagg.protocol.messages import Ask, HandoffDone, Reason
from headwater.errors import ConfigError

TOKEN = b"open sesame"


class Instance:
    """A service, and the events it posted."""

    def __init__(
        self,
        *,
        token: bytes = TOKEN,
        identity: bytes = b"i" * 32,
        block: int = 64,
        **settings: Any,
    ):
        self.events: SimpleQueue[object] = SimpleQueue()
        config = PeerConfig(token=token, identity=identity, block_bytes=block, **settings)
        self.service = PeerService(config, self.events.put, SystemClock())

    def event(self) -> object:
        return self.events.get(timeout=10)

    def all_events(self) -> list[object]:
        """Events so far."""
        events = []
        while not self.events.empty():
            events.append(self.events.get())
        return events

    def has_event(self) -> bool:
        try:
            self.events.get(timeout=0.05)
        except Empty:
            return False
        return True

    def close(self) -> None:
        self.service.close()


def dial(instance: Instance) -> Stream:
    host, _, port = instance.service.address.rpartition(":")
    return Stream(socket.create_connection((host, int(port)), 5))


def let_in(instance: Instance) -> tuple[Stream, AuthenticatedFrames]:
    """A peer that has proved the token and sent its hello, driven by the test."""
    stream = dial(instance)
    check_wait = timeout_check(SystemClock(), 5.0)
    session = client_handshake(stream, HandshakeTerms("peer", TOKEN, 64), check_wait)
    sealed = AuthenticatedFrames(stream, session.key, is_client=True)
    sealed.send(instance.service.hello(), check_wait)
    sealed.receive(check_wait, 4096)
    return stream, sealed


def was_closed(stream: Stream) -> bool:
    """Whether the other end closed the connection; waits for it."""
    try:
        while stream.socket.recv(64):
            pass
    except BlockingIOError:
        return was_closed(stream)
    except OSError:
        pass
    return True


def test_messages_go_both_ways_on_one_connection():
    """One end connects; the other one answers on the same connection."""
    with closing(Instance()) as p, closing(Instance()) as d:
        d.service.send(p.service.address, Ask(1))
        arrived = p.event()
        assert isinstance(arrived, PeerMessage)
        p.service.send(arrived.peer, HandoffDone(1))

        assert arrived.message == Ask(1)
        answered = d.event()
        assert isinstance(answered, PeerMessage)
        assert answered[:2] == (p.service.address, HandoffDone(1))


def test_messages_arrive_in_the_order_they_were_sent():
    """All messages arrive in order, also those that were sent before the connection was
    made."""
    with closing(Instance()) as p, closing(Instance()) as d:
        for number in range(50):
            d.service.send(p.service.address, Ask(number))
        arrived = [p.event() for _ in range(50)]

        assert [event.message.handoff for event in arrived] == list(range(50))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"token": b"guess"}, Reason.DENIED),
        ({"block": 128}, Reason.DENIED),
        ({"identity": b"j" * 32}, Reason.FINGERPRINT),
    ],
)
def test_a_peer_with_another_token_size_or_model_is_refused(other, reason):
    """The messages of such a peer are not processed."""
    with closing(Instance()) as p, closing(Instance(**other)) as d:
        number = d.service.send(p.service.address, Ask(1))

        assert d.event() == PeerLost(p.service.address, reason, number)
        assert not any(isinstance(event, PeerMessage) for event in p.all_events())


def test_another_version_is_refused():
    """The connection of a peer of another version is closed, and other peers are served."""
    with closing(Instance()) as p, closing(Instance()) as d:
        check_wait = timeout_check(SystemClock(), 5.0)
        stream = dial(p)
        session = client_handshake(stream, HandshakeTerms("peer", TOKEN, 64), check_wait)
        hello = json.loads(p.service.hello())
        hello["version"] += 1
        AuthenticatedFrames(stream, session.key, is_client=True).send(
            json.dumps(hello).encode(), check_wait
        )
        assert isinstance(p.event(), PeerLost)
        stream.close()

        d.service.send(p.service.address, Ask(1))
        assert isinstance(p.event(), PeerMessage)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "", "host:99999", "a:b:c"])
def test_an_address_where_nothing_listens_is_lost_at_once(address):
    """A message to such an address gives one event, and no exception."""
    with closing(Instance()) as d:
        number = d.service.send(address, Ask(1))

        assert d.event() == PeerLost(address, Reason.UNREACHABLE, number)
        assert not d.has_event()


def test_both_ends_learn_that_a_connection_ended_and_the_next_one_is_another():
    """Lesson 51: messages of the old connection are not delivered on the new one."""
    with closing(Instance()) as d:
        with closing(Instance()) as p:
            address = p.service.address
            first = d.service.send(address, Ask(1))
            p.event()
        assert d.event() == PeerLost(address, Reason.LOST, first)

        second = d.service.send(address, Ask(2))
        assert d.event() == PeerLost(address, Reason.UNREACHABLE, second)
        assert second != first


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
        b"\0" * 500,
        b"HWLINK\0\0" + b"\xff" * 200,
    ],
)
def test_unauthenticated_connections_are_dropped_and_others_served(garbage):
    """Bytes that are not a handshake end their connection and nothing else."""
    with closing(Instance()) as p, closing(Instance()) as d:
        stream = dial(p)
        stream.socket.sendall(garbage)
        assert was_closed(stream)
        stream.close()
        assert p.all_events() == [], "a stranger is no peer that could be lost"

        d.service.send(p.service.address, Ask(1))
        assert isinstance(p.event(), PeerMessage)


@pytest.mark.parametrize("what", ["seal", "body", "size"])
def test_a_malformed_message_drops_its_connection_only(what):
    """A malformed message ends the connection also of an authenticated peer."""
    with closing(Instance()) as p, closing(Instance()) as d:
        d.service.send(p.service.address, Ask(1))
        p.event()
        stream, sealed = let_in(p)
        if what == "body":
            sealed.send(b"no message", timeout_check(SystemClock(), 5.0))
        elif what == "seal":
            stream.socket.sendall(struct.pack("<I16s", 3, bytes(16)) + b"abc")
        else:
            stream.socket.sendall(struct.pack("<I16s", MAX_BODY_BYTES + 1, bytes(16)))

        assert isinstance(p.event(), PeerLost)
        stream.close()
        d.service.send(p.service.address, Ask(2))
        assert isinstance(p.event(), PeerMessage)


def test_a_repeated_frame_is_malformed():
    """Frames are numbered, so a recorded frame cannot be replayed."""
    with closing(Instance()) as p:
        stream, sealed = let_in(p)
        sealed._num_sent -= 1
        sealed.send(b"again", timeout_check(SystemClock(), 5.0))

        assert isinstance(p.event(), PeerLost)
        stream.close()


@pytest.mark.parametrize("change", ["mac", "body", "again", "back", "other key"])
def test_a_frame_that_its_sender_did_not_send_now_is_malformed(change):
    """A frame may be changed, repeated, sent back, or of another connection."""
    near, far = socket.socketpair()
    key = b"k" * 32
    sender = AuthenticatedFrames(Stream(near), key, is_client=True)
    receiver = AuthenticatedFrames(
        Stream(far), b"o" * 32 if change == "other key" else key, is_client=change == "back"
    )
    sender.send(b"hello", lambda: None)
    raw = bytearray(far.recv(4096))
    if change == "mac":
        raw[4] ^= 1
    if change == "body":
        raw[-1] ^= 1
    near.sendall(raw * 2 if change == "again" else raw)
    if change == "again":
        assert receiver.receive(lambda: None, 100) == b"hello"
    with pytest.raises(Malformed, match="wrong MAC"):
        receiver.receive(lambda: None, 100)
    near.close()
    far.close()


def test_a_token_is_needed():
    """No instance listens without a token."""
    with pytest.raises(ConfigError, match="token"):
        Instance(token=b"")


def test_closing_ends_the_threads():
    """Nothing is left behind."""
    with closing(Instance()) as p, closing(Instance()) as d:
        d.service.send(p.service.address, Ask(1))
        p.event()
    mine = [thread for thread in threads() if thread.name.startswith("peer")]
    for thread in mine:
        thread.join(5)

    assert not any(thread.is_alive() for thread in mine)


def test_connections_without_the_token_do_not_count_as_peers():
    """More strangers than `max_peers` are connected and silent; a peer is still accepted."""
    with closing(Instance(max_peers=2)) as p, closing(Instance()) as d:
        strangers = [dial(p) for _ in range(10)]
        d.service.send(p.service.address, Ask(1))

        assert isinstance(p.event(), PeerMessage)
        for stranger in strangers:
            stranger.close()


def test_many_unauthenticated_connections_keep_no_peer_out():
    """The oldest connection without the token is closed for the newest one."""
    crowded = Instance(max_unauthenticated=4, greeting_timeout_s=60.0)
    with closing(crowded) as p, closing(Instance()) as d:
        strangers = [dial(p) for _ in range(8)]
        d.service.send(p.service.address, Ask(1))

        assert isinstance(p.event(), PeerMessage)
        assert all(was_closed(stranger) for stranger in strangers[:4])
        for stranger in strangers:
            stranger.close()


def test_a_silent_connection_is_closed_after_the_greeting_timeout():
    """A connection that has sent one byte and then nothing is closed too."""
    with closing(Instance(greeting_timeout_s=0.2)) as p:
        stranger = dial(p)
        stranger.socket.sendall(b"H")

        assert was_closed(stranger)
        stranger.close()
        assert p.all_events() == []


def test_more_peers_than_max_peers_are_refused_with_a_reason():
    """The peer has the token, so it is told the reason."""
    with (
        closing(Instance(max_peers=1)) as p,
        closing(Instance()) as a,
        closing(Instance()) as b,
    ):
        a.service.send(p.service.address, Ask(1))
        assert isinstance(p.event(), PeerMessage)
        number = b.service.send(p.service.address, Ask(2))

        assert b.event() == PeerLost(p.service.address, Reason.DENIED, number)
