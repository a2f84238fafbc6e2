"""A peer that breaks the protocol: its bytes are never received, and no other peer is affected."""

import contextlib
import socket
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.clock import SystemClock
from headwater.disagg.links.frames import FRAME_BYTES, SentPiece, encode_frame, make_frame
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import PushFailure
from headwater.testing.link_contract import open_harness
from tests.disagg.wire import CONFIG, WIRE_LINKS, MakeLinks, RawSender

BLOCK_BYTES = 1 << 18


@pytest.fixture(params=WIRE_LINKS)
def harness(request):
    """A receiver with one lease of four slots."""
    with open_harness(MakeLinks(request.param), request.param, BLOCK_BYTES) as harness:
        harness.receiver.open(1, [3, 4, 5, 6])
        yield harness


@pytest.fixture
def peer(harness):
    peer = RawSender(harness.receiver.address, BLOCK_BYTES)
    yield peer
    peer.close()


def block(harness, index):
    return harness.source.rows[index].tobytes()


def serves_others(harness, job=99):
    """Whether another sender gets a block through."""
    harness.receiver.open(job, [0])
    harness.sender().push(harness.push(job, job, [0]))
    return harness.done(job) == BLOCK_BYTES


def is_dropped(peer):
    """Whether the receiver ends the connection."""
    with contextlib.suppress(OSError):
        peer.stream.socket.shutdown(socket.SHUT_WR)
    try:
        while True:
            peer.answer()
    except LinkBroken:
        return True


def test_a_block_with_a_flipped_bit_is_not_received_and_may_be_sent_again(harness, peer):
    """One bit of one block of a frame is flipped; the other blocks are received (lesson 54)."""
    if harness.receiver.address.startswith(("shm", "cuda")):
        pytest.skip("nothing travels that could be damaged on its way")
    blocks = {0: block(harness, 0), 1: block(harness, 1)}
    peer.send(peer.frame(0, 1, blocks, flip=8 * BLOCK_BYTES + 12345))

    assert peer.answer() == (0, PushFailure.DAMAGED)
    assert harness.log.received(1) == [0]
    peer.send(peer.frame(1, 1, blocks))
    assert peer.answer() == (1, None)
    assert harness.log.received(1) == [0, 1]
    assert np.array_equal(harness.target.rows[[3, 4]], harness.source.rows[:2])


def test_a_truncated_frame_is_not_received(harness, peer):
    """The peer disconnects in the middle; the lease stays, and another peer may fill it."""
    raw = peer.frame(0, 1, {0: block(harness, 0)})
    peer.send(raw[: len(raw) - 7])
    peer.stream.shut()

    assert serves_others(harness)
    harness.sender().push(harness.push(7, 1, [0]))
    while harness.log.outcome(7) == (
        7,
        PushFailure.TWICE,
    ):  # the old connection has not ended yet
        harness.log.events.clear()
        harness.sender().push(harness.push(7, 1, [0]))
    assert harness.done(7) == BLOCK_BYTES
    harness.receiver.fence(1)
    assert harness.log.closed(1).num_bytes == BLOCK_BYTES


def test_a_fence_holds_in_the_middle_of_a_block(harness, peer):
    """Half a block has arrived when its lease is fenced. The lease is closed although the peer
    stalls; the other half comes later (lesson 50)."""
    raw = peer.frame(0, 1, {0: block(harness, 0)})
    peer.send(raw[: len(raw) // 2])
    harness.receiver.fence(1)
    closed = harness.log.closed(1, 2.0)
    harness.target.rows[:] = 0
    peer.send(raw[len(raw) // 2 :])

    assert (closed.num_bytes, closed.blocks) == (0, frozenset())
    assert peer.answer() == (0, PushFailure.FENCED)
    assert harness.untouched(range(24))
    harness.receiver.open(2, [8])
    peer.send(peer.frame(1, 2, {0: block(harness, 5)}))
    assert peer.answer() == (1, None), "the connection and its other leases go on"


def test_a_bug_costs_a_connection_and_the_lease_still_ends(harness, monkeypatch):
    """The memory raises: the push is lost, and a fence still ends (lesson 50)."""

    def fail(slot):
        raise RuntimeError("no such slot")

    with monkeypatch.context() as broken:
        broken.setattr(harness.target, "view", fail)
        harness.sender().push(harness.push(1, 1, [0]))
        assert harness.failure(1) is PushFailure.LOST
    harness.receiver.fence(1)

    assert harness.log.closed(1, 2.0).num_bytes == 0
    assert serves_others(harness)


def test_a_late_write_to_shared_memory_reaches_no_slot(harness, peer):
    """One-sided writes may come at any time; only the receiver writes to slots."""
    if harness.receiver.address.startswith("tcp"):
        pytest.skip("nothing is shared")
    peer.send(peer.frame(0, 1, {0: block(harness, 0)}))
    peer.answer()
    harness.receiver.fence(1)
    harness.log.closed(1)
    before = harness.target.rows.copy()
    peer.stage(0, b"\xff" * BLOCK_BYTES)

    assert np.array_equal(harness.target.rows, before)


@pytest.mark.parametrize(
    ("number", "cell", "pieces"),
    [
        pytest.param(1, 0, [(0, 8)], id="a number that skips one"),
        pytest.param(0, 0, [(0, BLOCK_BYTES + 1)], id="more than a block"),
        pytest.param(0, 0, [(0, 0)], id="an empty piece"),
        pytest.param(0, 0, [(n, BLOCK_BYTES) for n in range(160)], id="more than a frame"),
        pytest.param(0, 1 << 30, [(0, 8)], id="a cell or a slot that is nowhere"),
        pytest.param(0, 0, [(n, 1) for n in range(257)], id="too many pieces"),
    ],
)
def test_a_frame_beyond_the_limits_costs_the_connection(harness, peer, number, cell, pieces):
    """Sizes are checked although the MAC is right (lesson 66)."""
    if cell and harness.receiver.address.startswith("tcp"):
        pytest.skip("what follows a tcp frame is nowhere else")
    if len(pieces) == 160 and harness.receiver.address.startswith("cuda"):
        pytest.skip("256 pieces of these blocks fit into a frame of this link")
    sent = tuple(SentPiece(at, cell, num_bytes, bytes(16)) for at, num_bytes in pieces)
    peer.send(encode_frame(make_frame(number, 1, cell, sent), peer.key))

    began_s = SystemClock().now()
    with pytest.raises(LinkBroken):
        peer.answer()
    assert SystemClock().now() - began_s < CONFIG.stall_timeout_s, "it was waited for"
    assert harness.untouched(range(24))
    assert serves_others(harness)


def test_a_frame_is_good_once_and_on_its_own_connection(harness, peer):
    """A repeated frame and a frame of another connection are refused."""
    raw = peer.frame(0, 1, {0: block(harness, 0)})
    other = RawSender(harness.receiver.address, BLOCK_BYTES)
    other.send(raw)
    with pytest.raises(LinkBroken):
        other.answer()
    other.close()
    peer.send(raw)
    assert peer.answer() == (0, None)
    peer.send(raw)
    with pytest.raises(LinkBroken):
        peer.answer()

    assert harness.log.received(1) == [0]


def test_two_connections_cannot_write_one_block_at_once(harness, peer):
    """The second connection is refused at once; it does not wait for the first."""
    if not harness.receiver.address.startswith("tcp"):
        pytest.skip("only a stream can stop in the middle of a block")
    raw = peer.frame(0, 1, {0: block(harness, 0)})
    peer.send(raw[:-1])
    other = RawSender(harness.receiver.address, BLOCK_BYTES)
    for number in range(200):
        other.send(other.frame(number, 1, {0: block(harness, 9)}, flip=0))
        _, failure = other.answer()
        if failure is PushFailure.TWICE:
            break
    other.close()
    peer.send(raw[-1:])

    assert failure is PushFailure.TWICE
    assert peer.answer() == (0, None)
    assert np.array_equal(harness.target.rows[3], harness.source.rows[0])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_frame_with_a_damaged_head_is_not_received(data):
    """Any bit of a frame's head may be flipped: index, lease, length, checksum, MAC (fuzz)."""
    with open_harness(MakeLinks("tcp"), "tcp", 512) as harness:
        harness.receiver.open(1, [3, 4])
        peer = RawSender(harness.receiver.address, 512)
        raw = bytearray(peer.frame(0, 1, {0: harness.source.rows[0].tobytes()}))
        bit = data.draw(st.integers(0, 8 * (FRAME_BYTES + 32) - 1))
        raw[bit // 8] ^= 1 << bit % 8
        peer.send(bytes(raw))
        assert is_dropped(peer)
        peer.close()

        assert harness.log.received(1) == []
        assert harness.untouched(range(24))


@settings(max_examples=60, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=400), greeted=st.booleans())
def test_garbage_costs_a_connection_and_nothing_else(garbage, greeted):
    """Random bytes end only their own connection, before the handshake and after it (fuzz)."""
    with open_harness(MakeLinks("tcp"), "tcp", 512) as harness:
        harness.receiver.open(1, [3])
        peer = (
            RawSender(harness.receiver.address, 512) if greeted else _Unauthenticated(harness)
        )
        peer.send(garbage)
        assert is_dropped(peer)
        peer.close()

        harness.sender().push(harness.push(1, 1, [0]))
        assert harness.done(1) == 512
        assert harness.log.received(1) == [0]


class _Unauthenticated(RawSender):
    """A peer without a handshake."""

    def __init__(self, harness) -> None:
        from headwater.disagg.peering.handshake import timeout_check
        from headwater.disagg.peering.stream import connect, parse_host_port

        self._wait_check = timeout_check(SystemClock(), 10.0)
        self.stream = connect(parse_host_port(harness.receiver.address), 1.0)
        self.stream.fill(memoryview(bytearray(struct.calcsize("<8sHH32s"))), self._wait_check)

    def close(self) -> None:
        self.stream.close()


def test_the_sender_takes_no_more_room_than_it_was_given(harness, peer):
    """A receiver refuses senders beyond its limit, with a reason (lesson 57)."""
    others = [
        RawSender(harness.receiver.address, BLOCK_BYTES) for _ in range(CONFIG.max_senders - 1)
    ]

    with pytest.raises(LinkBroken, match="limit of connections"):
        RawSender(harness.receiver.address, BLOCK_BYTES)
    for other in others:
        other.close()
