"""The `cuda` link without a GPU: main memory stands for the memory of a device."""

import contextlib
import os
import socket
import struct
from threading import Event, Thread

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.disagg.links import cuda
from headwater.disagg.links.frames import SentPiece, encode_frame, make_frame
from headwater.disagg.links.registry import Links
from headwater.disagg.peering.handshake import (
    HandshakeTerms,
    ServerHandshake,
    client_handshake,
    timeout_check,
)
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import Push, PushDone, PushFailure
from headwater.errors import ConfigError
from headwater.testing.device_blocks import PeerArray
from headwater.testing.link_contract import open_harness
from headwater.testing.links import BlockArray, EventLog
from headwater.transfer.shared import SharedPages
from tests.disagg.wire import CONFIG, MakeLinks, RawSender, pieces_of

BLOCK_BYTES = 1 << 16
OURS = HandshakeTerms("cuda", CONFIG.token, BLOCK_BYTES)


@pytest.fixture
def harness():
    with open_harness(MakeLinks("cuda"), "cuda", BLOCK_BYTES) as harness:
        yield harness
        harness.target.device.opened.set()


def hold_copies(harness) -> None:
    """Let copies begin and not end."""
    harness.target.device.opened.clear()


def let_copies_end(harness) -> None:
    harness.target.device.opened.set()


def test_a_lease_is_closed_when_its_last_copy_has_ended(harness):
    """A fence cannot stop a copy of the device, so the fence waits for the copy (lesson 50)."""
    harness.receiver.open(1, [3])
    hold_copies(harness)
    harness.sender().push(harness.push(1, 1, [0]))
    assert harness.target.device.begun.wait(10.0)
    harness.receiver.fence(1)

    assert harness.log.closings(1) == []
    assert harness.log.outcomes(1) == []
    let_copies_end(harness)
    assert harness.log.closed(1).blocks == frozenset({0})
    assert harness.done(1) == BLOCK_BYTES


def test_slots_reused_after_a_deadline_are_not_received(harness):
    """P gave up during a copy and has reused the slots (lesson 50)."""
    harness.receiver.open(1, [3, 4])
    hold_copies(harness)
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0, 1], wait_s=0.2))
    assert harness.target.device.begun.wait(10.0)
    assert harness.failure(1) is PushFailure.TIMEOUT
    harness.source.rows[:2] = 255
    let_copies_end(harness)
    sender.push(harness.push(2, 1, [2]))

    assert harness.failure(2) is PushFailure.OUTSIDE, "the first frame has been dealt with"
    harness.receiver.fence(1)
    assert harness.log.closed(1).num_bytes == 0


def test_slots_reused_after_close_are_not_received(harness):
    """The sender was closed during a copy and reuses its slots; the lease is closed only after
    the copy (lesson 50)."""
    harness.receiver.open(1, [3])
    hold_copies(harness)
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert harness.target.device.begun.wait(10.0)
    sender.close()
    assert harness.failure(1) is PushFailure.CLOSED
    harness.source.rows[0] = 255
    harness.receiver.fence(1)
    assert harness.log.closings(1) == []
    let_copies_end(harness)

    assert harness.log.closed(1).num_bytes == 0


def test_a_frame_behind_one_that_is_given_up_is_received(harness):
    """Frames are invalidated one by one."""
    harness.receiver.open(1, [3, 4])
    hold_copies(harness)
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0], wait_s=0.2))
    assert harness.target.device.begun.wait(10.0)
    sender.push(harness.push(2, 1, [1]))
    assert harness.failure(1) is PushFailure.TIMEOUT
    harness.source.rows[0] = 255
    let_copies_end(harness)

    assert harness.done(2) == BLOCK_BYTES
    assert harness.log.received(1) == [1]


def test_the_next_frame_is_copied_before_the_last_one_is_answered(harness):
    """The device has work while the receiver reports a frame."""
    harness.receiver.open(1, [3, 4])
    hold_copies(harness)
    peer = RawSender(harness.receiver.address, BLOCK_BYTES)
    words = peer.outbound._validity._words  # type: ignore[attr-defined] # no peer of ours does this
    words[:2] = [1, 2]
    frames = []
    for number in range(2):
        piece = SentPiece(number, number, BLOCK_BYTES, bytes(16))
        frames.append(encode_frame(make_frame(number, 1, number, (piece,)), peer.key))
    peer.send(frames[0] + frames[1])
    assert harness.target.device.begun.wait(10.0)
    let_copies_end(harness)

    assert peer.answer() == (0, None)
    assert peer.answer() == (1, None)
    peer.close()


@pytest.mark.parametrize(("is_near", "num_started"), [(False, 2), (True, 4)])
def test_so_many_frames_are_copied_at_once(harness, monkeypatch, is_near, num_started):
    """A fence waits for the frames that are being copied, so their number is smaller where
    copies are slower (lesson 50)."""
    monkeypatch.setattr(PeerArray, "is_near", is_near)
    started, noted = [], Event()
    start_copy = PeerArray.start_copy

    def note(peer, sources, targets, sizes):
        started.append(sources)
        if len(started) == num_started:
            noted.set()
        return start_copy(peer, sources, targets, sizes)

    monkeypatch.setattr(PeerArray, "start_copy", note)
    for lease in range(1, 9):
        sender = harness.sender()  # its pushes wait for the connection, and come together
        started.clear()
        noted.clear()
        harness.receiver.open(lease, range(6))
        hold_copies(harness)
        jobs = [6 * lease + index for index in range(6)]
        for index, job in enumerate(jobs):
            sender.push(harness.push(job, lease, [index]))
        # A frame that comes late on a busy machine is received when the copy before has ended.
        is_complete = noted.wait(1.0)
        assert not Event().wait(0.1), "time in which further copies would be started"
        num_held = len(started)
        let_copies_end(harness)
        assert [harness.done(job) for job in jobs] == [BLOCK_BYTES] * 6
        harness.receiver.fence(lease)
        harness.log.closed(lease)
        if is_complete:
            break

    assert num_held == num_started


def test_a_peer_that_stops_in_the_middle_of_a_frame_delays_no_answer(harness):
    """The complete frame before the one that stops is reported and answered at once."""
    harness.receiver.open(1, [3, 4])
    peer = RawSender(harness.receiver.address, BLOCK_BYTES)
    first = peer.frame(0, 1, {0: bytes(BLOCK_BYTES)})
    peer.outbound._validity._words[1] = 2  # type: ignore[attr-defined] # as above
    piece = SentPiece(1, 1, BLOCK_BYTES, bytes(16))
    second = encode_frame(make_frame(1, 1, 1, (piece,)), peer.key)
    for end in (5, len(second) - 5):
        peer.send(first + second[:end] if end == 5 else second[5:end])
        if end == 5:
            assert peer.answer() == (0, None)
    peer.send(second[-5:])

    assert peer.answer() == (1, None)
    peer.close()


def test_a_block_that_is_being_copied_may_be_sent_again(harness):
    """Sending a block again during its copy is no failure, as on the other links."""
    harness.receiver.open(1, [3, 4])
    hold_copies(harness)
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert harness.target.device.begun.wait(10.0)
    sender.push(harness.push(2, 1, [0, 1]))
    let_copies_end(harness)

    assert harness.done(1) == BLOCK_BYTES
    assert harness.done(2) == 2 * BLOCK_BYTES
    assert harness.log.received(1) == [0, 1]


def test_a_copy_that_fails_is_not_received(harness):
    """The device reports an error: the push fails, and the connection stays (lesson 53)."""
    harness.receiver.open(1, [3, 4])
    harness.target.device.fails = True
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert harness.failure(1) is PushFailure.DAMAGED
    harness.target.device.fails = False
    sender.push(harness.push(2, 1, [1]))

    assert harness.done(2) == BLOCK_BYTES
    harness.receiver.fence(1)
    assert harness.log.closed(1).blocks == frozenset({1})


def test_a_receiver_that_cannot_map_the_memory_refuses(harness):
    """The receiver's device cannot reach the sender's: the sender is told, and no push
    waits."""
    harness.receiver.open(1, [3])
    harness.target.device.refuses = True
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert harness.failure(1) is PushFailure.REFUSED
    harness.target.device.refuses = False
    sender.push(harness.push(2, 1, [0]))

    assert harness.done(2) == BLOCK_BYTES


def test_a_frame_without_a_validity_word_costs_the_connection_and_the_lease_ends(harness):
    """The validity word is looked up after the copy; the lease is closed nevertheless (lesson
    66)."""
    harness.receiver.open(1, [3])
    peer = RawSender(harness.receiver.address, BLOCK_BYTES)
    piece = SentPiece(0, 0, BLOCK_BYTES, bytes(16))
    peer.send(encode_frame(make_frame(0, 1, 1 << 30, (piece,)), peer.key))
    with pytest.raises(LinkBroken):
        peer.answer()
    harness.receiver.fence(1)

    assert harness.log.closed(1).num_bytes == 0
    peer.close()


@pytest.mark.parametrize("kind", ["nothing", "too small", "no memory", "no validity words"])
def test_descriptors_that_are_wrong_cost_the_connection(harness, kind):
    """No other peer is affected (lesson 66)."""
    harness.receiver.open(1, [0])
    memory, words = SharedPages(4 * BLOCK_BYTES), SharedPages(4096)
    reading, writing = os.pipe()
    files = {
        "nothing": [],
        "too small": [memory.file, words.file],
        "no memory": [reading, words.file],
        "no validity words": [memory.file, reading],
    }[kind]
    size = 8 if kind == "too small" else 4
    connected = socket.socket(socket.AF_UNIX)
    connected.connect("\0" + harness.receiver.address.removeprefix("cuda://"))
    stream, check_wait = Stream(connected), timeout_check(SystemClock(), 5.0)
    client_handshake(stream, OURS, check_wait)
    socket.send_fds(connected, [struct.pack("<Q", size * BLOCK_BYTES)], files)
    with pytest.raises(LinkBroken):
        stream.fill(memoryview(bytearray(2)), check_wait)
    stream.close()
    os.close(reading)
    os.close(writing)
    harness.sender().push(harness.push(1, 1, [0]))

    assert harness.done(1) == BLOCK_BYTES


@pytest.mark.parametrize("has_token", [True, False])
def test_the_descriptor_is_passed_only_to_a_peer_with_the_token(has_token):
    """A descriptor of device memory lets its owner read and write the whole pool (lesson 66)."""
    listener = socket.socket(socket.AF_UNIX)
    name = f"headwater-test-cuda-{has_token}-{os.getpid()}"
    listener.bind(f"\0{name}")
    listener.listen(1)
    got: list[int] = []
    thread = Thread(target=_take_files, args=(listener, has_token, got))
    thread.start()
    log = EventLog()
    sender = Links(CONFIG, BlockArray(4, BLOCK_BYTES), log).connect(f"cuda://{name}")
    deadline_s = SystemClock().now() + 5.0
    sender.push(Push(job=1, lease=1, pieces=pieces_of([0], BLOCK_BYTES), deadline_s=deadline_s))
    log.outcome(1)
    thread.join(10.0)
    sender.close()
    listener.close()

    assert len(got) == (2 if has_token else 0)
    for file in got:
        os.close(file)


def _take_files(listener, has_token, got) -> None:
    connected, _ = listener.accept()
    stream, check_wait = Stream(connected), timeout_check(SystemClock(), 5.0)
    terms = OURS if has_token else OURS._replace(token=b"another token")
    with contextlib.suppress(LinkBroken, OSError):
        ServerHandshake(stream, terms, check_wait).accept()
        stream.await_readable()
        got += socket.recv_fds(connected, 8, 2)[1]
    stream.close()


def test_an_instance_without_a_gpu_is_told_at_once():
    """The message names the link to use instead. An instance whose pool peers cannot map gets a
    message, too (lesson 61)."""

    class Plain:
        block_bytes = BLOCK_BYTES

        def view(self, slot):
            raise AssertionError(slot)

    links = Links(CONFIG, Plain(), EventLog())
    with pytest.raises(ConfigError, match="needs a GPU"):
        links.listen("cuda")
    private = BlockArray(4, BLOCK_BYTES)
    private.file = None
    with pytest.raises(ConfigError, match="cannot map the device memory"):
        Links(CONFIG, private, EventLog()).connect("cuda://headwater-unknown")


@pytest.mark.parametrize(("is_near", "num_frames"), [(False, 2), (True, 1)])
def test_frames_are_larger_on_one_device(harness, monkeypatch, is_near, num_frames):
    """On one device, receiving and answering a frame takes longer than copying its blocks."""
    monkeypatch.setattr(PeerArray, "is_near", is_near)
    monkeypatch.setattr(cuda, "_FRAME_SIZES", (2 * BLOCK_BYTES, 4 * BLOCK_BYTES))
    monkeypatch.setattr(cuda, "_NEAR_SIZES", (4 * BLOCK_BYTES, 8 * BLOCK_BYTES))
    harness.receiver.open(1, range(4))
    frames = []
    start_copy = PeerArray.start_copy

    def noted(peer, sources, targets, sizes):
        frames.append(sources)
        return start_copy(peer, sources, targets, sizes)

    monkeypatch.setattr(PeerArray, "start_copy", noted)
    harness.sender().push(harness.push(1, 1, [0, 1, 2, 3]))

    assert harness.done(1) == 4 * BLOCK_BYTES
    assert len(frames) == num_frames


def test_many_small_frames_arrive_in_order(harness):
    """Two frames of 256 blocks are in flight at a time."""
    num_blocks = 1500
    source, target = BlockArray(num_blocks, 512, seed=3), BlockArray(num_blocks, 512)
    receiver = Links(CONFIG, target, harness.log).listen("cuda")
    receiver.open(9, list(reversed(range(num_blocks))))
    sender = Links(CONFIG, source, harness.log).connect(receiver.address)
    deadline_s = SystemClock().now() + 30.0
    pieces = pieces_of(range(num_blocks), 512)
    sender.push(Push(job=9, lease=9, pieces=pieces, deadline_s=deadline_s))

    assert harness.log.outcome(9) == PushDone(9, num_blocks * 512)
    assert harness.log.received(9) == list(range(num_blocks))
    assert np.array_equal(target.rows[::-1], source.rows)
    sender.close()
    receiver.close()
