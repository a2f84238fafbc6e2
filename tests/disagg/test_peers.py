"""Control connections: who is let in, what ends one, and what never ends the process."""

import json
import socket
import struct
from contextlib import closing
from queue import Empty, SimpleQueue
from threading import enumerate as threads

import pytest

from headwater.clock import SystemClock
from headwater.disagg.peering.handshake import HandshakeTerms, client_handshake, timeout_check
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.peering.service import PeerConfig, PeerService, _AuthenticatedFrames
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.codec import MAX_BODY_BYTES
from headwater.disagg.protocol.messages import Ask, HandoffDone, Reason
from headwater.errors import ConfigError

TOKEN = b"open sesame"


class Instance:
    """A service, and the events it posted."""

    def __init__(self, *, token: bytes = TOKEN, identity: bytes = b"i" * 32, block: int = 64):
        self.events: SimpleQueue[object] = SimpleQueue()
        config = PeerConfig(token=token, identity=identity, block_bytes=block)
        self.service = PeerService(config, self.events.put, SystemClock())

    def event(self) -> object:
        return self.events.get(timeout=10)

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


def let_in(instance: Instance) -> tuple[Stream, _AuthenticatedFrames]:
    """A peer that has proved itself and said hello, driven by hand."""
    stream = dial(instance)
    check_wait = timeout_check(SystemClock(), 5.0)
    session = client_handshake(stream, HandshakeTerms("peer", TOKEN, 64), check_wait)
    sealed = _AuthenticatedFrames(stream, session.key, is_client=True)
    sealed.send(instance.service.hello(), check_wait)
    sealed.receive(check_wait, 4096)
    return stream, sealed


def test_messages_go_both_ways_on_one_connection():
    """One end dials; the other answers on the name that the connection got."""
    with closing(Instance()) as p, closing(Instance()) as d:
        d.service.send(p.service.address, Ask(1))
        arrived = p.event()
        assert isinstance(arrived, PeerMessage)
        p.service.send(arrived.peer, HandoffDone(1))

        assert arrived.message == Ask(1)
        assert d.event() == PeerMessage(p.service.address, HandoffDone(1))


def test_messages_arrive_in_the_order_they_were_sent():
    """Those that were sent before the connection was made, too."""
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
def test_who_is_not_one_of_us_is_refused(other, reason):
    """Another token, another size of blocks, another model; and nothing that it said counts."""
    with closing(Instance()) as p, closing(Instance(**other)) as d:
        d.service.send(p.service.address, Ask(1))

        assert d.event() == PeerLost(p.service.address, reason)
        lost = p.event()
        assert isinstance(lost, PeerLost)


def test_another_version_is_refused():
    """Who speaks another version is told so by the end of the connection, and nobody else is
    harmed."""
    with closing(Instance()) as p, closing(Instance()) as d:
        check_wait = timeout_check(SystemClock(), 5.0)
        stream = dial(p)
        session = client_handshake(stream, HandshakeTerms("peer", TOKEN, 64), check_wait)
        hello = json.loads(p.service.hello())
        hello["version"] += 1
        _AuthenticatedFrames(stream, session.key, is_client=True).send(
            json.dumps(hello).encode(), check_wait
        )
        assert isinstance(p.event(), PeerLost)
        stream.close()

        d.service.send(p.service.address, Ask(1))
        assert isinstance(p.event(), PeerMessage)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "", "host:99999", "a:b:c"])
def test_an_address_where_nobody_is_is_lost_at_once(address):
    """One event, and no exception."""
    with closing(Instance()) as d:
        d.service.send(address, Ask(1))

        assert d.event() == PeerLost(address, Reason.UNREACHABLE)
        assert not d.has_event()


def test_both_ends_learn_that_a_connection_ended_and_the_next_one_is_another():
    """Lesson 51: what was sent on the old one is not seen on the new one."""
    with closing(Instance()) as d:
        with closing(Instance()) as p:
            address = p.service.address
            d.service.send(address, Ask(1))
            p.event()
        assert d.event() == PeerLost(address, Reason.LOST)

        d.service.send(address, Ask(2))
        assert d.event() == PeerLost(address, Reason.UNREACHABLE)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
        b"\0" * 500,
        b"HWLINK\0\0" + b"\xff" * 200,
    ],
)
def test_strangers_are_dropped_and_others_served(garbage):
    """Bytes that are no greeting end their connection and nothing else."""
    with closing(Instance()) as p, closing(Instance()) as d:
        stream = dial(p)
        stream.socket.sendall(garbage)
        assert isinstance(p.event(), PeerLost)
        stream.close()

        d.service.send(p.service.address, Ask(1))
        assert isinstance(p.event(), PeerMessage)


@pytest.mark.parametrize("what", ["seal", "body", "size"])
def test_a_malformed_message_drops_its_connection_only(what):
    """From a peer that was let in, even."""
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
    """Frames are numbered: who records and repeats one is not who sent it."""
    with closing(Instance()) as p:
        stream, sealed = let_in(p)
        sealed._num_sent -= 1
        sealed.send(b"again", timeout_check(SystemClock(), 5.0))

        assert isinstance(p.event(), PeerLost)
        stream.close()


def test_a_token_is_needed():
    """No instance listens to everybody."""
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
