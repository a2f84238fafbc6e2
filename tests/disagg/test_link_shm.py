"""Memory that one instance shares with another: only with the token, read-only, unchanged."""

import contextlib
import fcntl
import mmap
import os
import socket
import struct
from threading import Event, Thread, current_thread

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.disagg.links.frames import FRAME_BYTES, MAX_PIECES, PIECE_BYTES, encode_answer
from headwater.disagg.links.leases import ArrivingBlocks
from headwater.disagg.links.registry import Links
from headwater.disagg.peering.handshake import (
    _CHALLENGE,
    _MAGIC,
    _WELCOME,
    VERSION,
    HandshakeResult,
    HandshakeTerms,
    ServerHandshake,
    client_handshake,
    timeout_check,
)
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import Push, PushDone, PushFailure
from headwater.errors import ConfigError
from headwater.testing.link_contract import open_harness
from headwater.testing.links import BlockArray, EventLog
from headwater.transfer.shared import SharedPages, map_shared
from tests.disagg.wire import CONFIG, MakeLinks, pieces_of

BLOCK_BYTES = 1 << 16
OURS = HandshakeTerms("shm", CONFIG.token, BLOCK_BYTES)


def private_blocks(num_slots, block_bytes):
    """Blocks in private memory."""
    blocks = BlockArray(num_slots, block_bytes)
    blocks.file = None
    return blocks


@pytest.fixture
def harness():
    with open_harness(MakeLinks("shm"), "shm", BLOCK_BYTES) as harness:
        yield harness


def test_a_peer_can_read_the_memory_and_not_write_it():
    """The kernel refuses a writable mapping, a write and a change of size."""
    pages = SharedPages(1 << 16)
    pages.memory[:3] = b"abc"
    theirs = map_shared(pages.file, 1 << 16)

    assert bytes(theirs[:3]) == b"abc"
    assert theirs.readonly
    pages.memory[:3] = b"xyz"
    assert bytes(theirs[:3]) == b"xyz"
    for attempt in (
        lambda: mmap.mmap(pages.file, 1 << 16),
        lambda: os.pwrite(pages.file, b"!", 0),
        lambda: os.ftruncate(pages.file, 0),
        lambda: os.ftruncate(pages.file, 1 << 20),
        lambda: fcntl.fcntl(pages.file, fcntl.F_ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            attempt()


@pytest.mark.parametrize("has_token", [True, False])
def test_the_memory_is_passed_only_to_a_peer_with_the_token(has_token):
    """A receiver that accepts everything gets no descriptor."""
    listener = socket.socket(socket.AF_UNIX)
    name = f"headwater-test-{os.getpid()}"
    listener.bind(f"\0{name}")
    listener.listen(1)
    got: list[int] = []
    thread = Thread(target=take_file, args=(listener, has_token, got))
    thread.start()
    with contextlib.suppress(LinkBroken):
        links = Links(CONFIG, BlockArray(4, BLOCK_BYTES), EventLog())
        sender = links.connect(f"shm://{name}")
        sender._connected(timeout_check(SystemClock(), 5.0))  # type: ignore[attr-defined] # no lease needed
    thread.join(10.0)
    sender.close()
    listener.close()

    assert len(got) == (2 if has_token else 0)
    for file in got:
        os.close(file)


def test_an_answer_to_a_frame_that_was_not_sent_costs_the_connection():
    """All validity words are in use, so the fifth frame waits; an answer to it is invalid."""
    listener = socket.socket(socket.AF_UNIX)
    name = f"headwater-test-liar-{os.getpid()}"
    listener.bind(f"\0{name}")
    listener.listen(1)
    thread = Thread(target=answer_unsent, args=(listener,))
    thread.start()
    source, log = BlockArray(5 * MAX_PIECES, 64), EventLog()
    sender = Links(CONFIG, source, log).connect(f"shm://{name}")
    deadline_s = SystemClock().now() + 30.0
    pieces = pieces_of(range(5 * MAX_PIECES), 64)
    sender.push(Push(job=1, lease=1, pieces=pieces, deadline_s=deadline_s))

    assert log.outcome(1, 5.0) == (1, PushFailure.LOST)
    sender.close()
    thread.join(10.0)
    listener.close()


def answer_unsent(listener):
    """A receiver that takes four frames and answers the fifth."""
    connected, _ = listener.accept()
    stream, check_wait = Stream(connected), timeout_check(SystemClock(), 5.0)
    ServerHandshake(stream, HandshakeTerms("shm", CONFIG.token, 64), check_wait).accept()
    stream.await_readable()
    _, files, _, _ = socket.recv_fds(connected, 8, 2)
    frames = memoryview(bytearray(4 * (FRAME_BYTES + MAX_PIECES * PIECE_BYTES)))
    stream.fill(frames, check_wait)
    with contextlib.suppress(LinkBroken):
        while True:
            stream.send([encode_answer(4, None)], check_wait)
            stream.fill(memoryview(bytearray(1)), check_wait)
    stream.close()
    for file in files:
        os.close(file)


def take_file(listener, has_token, got):
    """A receiver that asks for the memory, with the token or a wrong one."""
    connected, _ = listener.accept()
    stream, check_wait = Stream(connected), timeout_check(SystemClock(), 5.0)
    if has_token:
        ServerHandshake(stream, OURS, check_wait).accept()
    else:
        stream.send([_CHALLENGE.pack(_MAGIC, VERSION, 0, bytes(32))], check_wait)
        stream.fill(memoryview(bytearray(88)), check_wait)
        stream.send([_WELCOME.pack(HandshakeResult.WELCOME, 0, bytes(32))], check_wait)
    stream.await_readable()
    with contextlib.suppress(OSError):
        _, files, _, _ = socket.recv_fds(connected, 8, 2)
        got.extend(files)
    stream.close()


def offered(kind: str) -> tuple[bytes, list[int]]:
    """Descriptors that a peer may pass instead of its memory."""
    size = 4 * BLOCK_BYTES
    offer = struct.pack("<Q", size)
    good = SharedPages(size)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, size)
    if kind == "nothing":
        os.close(loose)
        return offer, []
    if kind == "too short":
        os.ftruncate(loose, size // 2)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(loose, fcntl.F_ADD_SEALS, seals)
    if kind == "a pipe":
        os.close(loose)
        loose, end = os.pipe()
        os.close(end)
    if kind == "unsealed validity words":
        return offer, [os.dup(good.file), loose]
    return offer, [loose, os.dup(good.file)]


@pytest.mark.parametrize(
    "kind", ["nothing", "unsealed", "too short", "a pipe", "unsealed validity words"]
)
def test_memory_that_can_shrink_ends_the_connection(harness, kind):
    """Memory that can shrink would kill the receiver's process during a copy (lesson 66)."""
    harness.receiver.open(1, [0])
    raw, files = offered(kind)
    connected = socket.socket(socket.AF_UNIX)
    connected.connect("\0" + harness.receiver.address.removeprefix("shm://"))
    stream, check_wait = Stream(connected), timeout_check(SystemClock(), 5.0)
    client_handshake(stream, OURS, check_wait)
    socket.send_fds(connected, [raw], files)
    with pytest.raises(LinkBroken):
        stream.fill(memoryview(bytearray(1)), check_wait)
    stream.close()
    for file in files:
        os.close(file)
    harness.sender().push(harness.push(1, 1, [0]))

    assert harness.done(1) == BLOCK_BYTES


class Held:
    """A receiver that has begun to copy a block, and goes on when the test lets it."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.let = Event(), Event()
        copy = ArrivingBlocks.copy

        def held(arriving, at, source):
            self.begun.set()
            assert self.let.wait(10.0)
            copy(arriving, at, source)

        monkeypatch.setattr(ArrivingBlocks, "copy", held)


@pytest.fixture
def held(monkeypatch):
    held = Held(monkeypatch)
    yield held
    held.let.set()


def test_slots_reused_after_a_deadline_are_not_received(harness, held):
    """P gave up during a copy and has reused the slots (lesson 50)."""
    harness.receiver.open(1, [3, 4])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0, 1], wait_s=0.2))
    assert held.begun.wait(5.0)
    assert harness.failure(1) is PushFailure.TIMEOUT
    harness.source.rows[:2] = 255
    held.let.set()
    sender.push(harness.push(2, 1, [2]))

    assert harness.failure(2) is PushFailure.OUTSIDE, "the first frame has been dealt with"
    harness.receiver.fence(1)
    assert harness.log.closed(1).num_bytes == 0


def test_slots_reused_after_close_are_not_received(harness, held):
    """The sender was closed during a copy, and its slots are reused."""
    harness.receiver.open(1, [3])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert held.begun.wait(5.0)
    sender.close()
    assert harness.failure(1) is PushFailure.CLOSED
    harness.source.rows[0] = 255
    held.let.set()

    harness.receiver.fence(1)
    assert harness.log.closed(1).num_bytes == 0


def test_one_push_that_is_given_up_does_not_touch_the_next(harness, held):
    """Frames are invalidated one by one: a frame behind a late one is still received."""
    harness.receiver.open(1, [3, 4])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0], wait_s=0.2))
    assert held.begun.wait(5.0)
    sender.push(harness.push(2, 1, [1]))
    assert harness.failure(1) is PushFailure.TIMEOUT
    harness.source.rows[0] = 255
    held.let.set()

    assert harness.done(2) == BLOCK_BYTES
    assert harness.log.received(1) == [1]


def test_two_threads_share_a_large_frame(harness):
    """Each block is copied once, to its slot."""
    num_blocks = 100
    source = BlockArray(num_blocks, BLOCK_BYTES, seed=7)
    target = BlockArray(num_blocks, BLOCK_BYTES)
    receiver = Links(CONFIG, target, harness.log).listen("shm")
    receiver.open(9, list(reversed(range(num_blocks))))
    sender = Links(CONFIG, source, harness.log).connect(receiver.address)
    deadline_s = SystemClock().now() + 30.0
    pieces = pieces_of(range(num_blocks), BLOCK_BYTES)
    sender.push(Push(job=9, lease=9, pieces=pieces, deadline_s=deadline_s))

    assert harness.done(9) == num_blocks * BLOCK_BYTES
    assert harness.log.received(9) == list(range(num_blocks))
    assert np.array_equal(target.rows[::-1], source.rows)
    sender.close()
    receiver.close()


def test_a_lease_is_not_closed_while_one_of_two_threads_still_copies(harness, monkeypatch):
    """One copying thread has failed already; the lease waits for the other one (lesson 50)."""
    begun, let, copy = Event(), Event(), ArrivingBlocks.copy

    def fails_or_waits(arriving, at, source):
        if not current_thread().name.startswith("shm-copy"):
            assert begun.wait(10.0)
            raise RuntimeError("a fault of ours")
        begun.set()
        assert let.wait(10.0)
        copy(arriving, at, source)

    monkeypatch.setattr(ArrivingBlocks, "copy", fails_or_waits)
    source, target = BlockArray(2, 4 << 20, seed=7), BlockArray(2, 4 << 20)
    receiver = Links(CONFIG, target, harness.log).listen("shm")
    receiver.open(9, [0, 1])
    sender = Links(CONFIG, source, harness.log).connect(receiver.address)
    deadline_s = SystemClock().now() + 0.2
    sender.push(Push(job=9, lease=9, pieces=pieces_of([0, 1], 4 << 20), deadline_s=deadline_s))
    harness.failure(9)
    receiver.fence(9)

    assert harness.log.closings(9) == [], "a thread is about to write"
    let.set()
    assert harness.log.closed(9).blocks == frozenset()
    sender.close()
    receiver.close()


def test_private_blocks_are_refused_at_once():
    """An operator who starts only one of two peers with this link gets a message (lesson
    61)."""
    links = Links(CONFIG, private_blocks(4, BLOCK_BYTES), EventLog())

    with pytest.raises(ConfigError, match="not in shared memory"):
        links.connect("shm://headwater-unknown")


def test_a_receiver_needs_no_shared_memory():
    """A receiver reads the memory of others; its own may be private."""
    source, target, log = BlockArray(4, 4096, seed=1), private_blocks(4, 4096), EventLog()
    receiver = Links(CONFIG, target, log).listen("shm")
    receiver.open(1, [2])
    sender = Links(CONFIG, source, log).connect(receiver.address)
    deadline_s = SystemClock().now() + 30.0
    sender.push(Push(job=1, lease=1, pieces=pieces_of([0], 4096), deadline_s=deadline_s))
    outcome = log.outcome(1)
    sender.close()
    receiver.close()

    assert outcome == PushDone(1, 4096)
    assert np.array_equal(target.rows[2], source.rows[0])
