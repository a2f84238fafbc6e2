"""Links whose peer dies, stops or lies: every push and every lease still ends."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import ANSWER_BYTES, encode_answer
from headwater.disagg.links.registry import Links
from headwater.disagg.peering.handshake import HandshakeTerms, ServerHandshake, timeout_check
from headwater.disagg.peering.stream import Stream
from headwater.disagg.protocol.errors import LinkBroken
from headwater.disagg.protocol.push import BlockPiece, Push, PushDone, PushFailed, PushFailure
from headwater.testing.link_contract import open_harness
from headwater.testing.links import BlockArray, EventLog
from tests.disagg import far
from tests.disagg.wire import LINKS, MakeLinks, RawSender, engine, pieces_of
from tests.still import stopped

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def start():
    """Starts far ends, and ends them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.disagg.far", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str], begins: str) -> str:
    """The next line with this prefix; other lines come from a library."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return line.strip()
    raise AssertionError(f"the far end said nothing that begins with {begins!r}")


@pytest.mark.parametrize("link", LINKS)
def test_a_sender_killed_in_the_middle_leaves_an_exact_byte_count(link, start):
    """After kill -9 during a push, received blocks are complete and the others are missing
    (lessons 53, 54)."""
    target, log = BlockArray(far.NUM_SLOTS, far.BLOCK_BYTES), EventLog()
    given = engine("receiver") if link == "mooncake" else None
    receiver = Links(far.CONFIG, target, log, engine=given).listen(link)
    for lease in range(1, 1001):
        receiver.open(lease, range(far.NUM_SLOTS))
    sender = start("send", receiver.address, "1000")
    line_of(sender, "PushDone")
    sender.kill()
    sender.wait()
    for lease in range(1, 1001):
        receiver.fence(lease)
    closings = [log.closed(lease) for lease in range(1, 1001)]
    receiver.close()

    assert closings[0].num_bytes == far.NUM_SLOTS * far.BLOCK_BYTES
    for closed in closings:
        assert closed.num_bytes == len(closed.blocks) * far.BLOCK_BYTES
        assert sorted(log.received(closed.lease)) == sorted(closed.blocks)
    source = BlockArray(far.NUM_SLOTS, far.BLOCK_BYTES, seed=far.SEED)
    last = next((closed for closed in reversed(closings) if closed.blocks), closings[0])
    for index in last.blocks:
        assert np.array_equal(target.rows[index], source.rows[index])


@pytest.mark.parametrize("link", LINKS)
def test_a_receiver_that_is_killed_fails_every_push_at_once(link, start):
    """Pushes fail long before their deadlines (lesson 53)."""
    log, clock = EventLog(), SystemClock()
    given = engine("sender") if link == "mooncake" else None
    receiver = start("receive", link)
    address = line_of(receiver, link)
    source = BlockArray(far.NUM_SLOTS, far.BLOCK_BYTES, seed=far.SEED)
    sender = Links(far.CONFIG, source, log, engine=given).connect(address)
    push_all(sender, range(5))
    first = log.outcome(0)
    receiver.kill()
    push_all(sender, range(5, 10))
    began = clock.now()
    outcomes = [log.outcome(job) for job in range(10)]
    took_s = clock.now() - began
    sender.close()

    assert isinstance(first, PushDone)
    assert isinstance(outcomes[-1], PushFailed)
    assert took_s < 10.0
    assert all(len(log.outcomes(job)) == 1 for job in range(10))


@pytest.mark.parametrize("link", ["auto", "tcp", "shm", "cuda"])
def test_a_receiver_that_stops_answering_costs_pushes_their_deadline(link, start):
    """After SIGSTOP no wait is longer than its deadline, and the link works again
    afterwards."""
    log, clock = EventLog(), SystemClock()
    receiver = start("receive", link)
    address = line_of(receiver, link)
    source = BlockArray(far.NUM_SLOTS, far.BLOCK_BYTES, seed=far.SEED)
    sender = Links(far.CONFIG, source, log).connect(address)
    push_all(sender, [0])
    log.outcome(0)
    with stopped(receiver.pid):
        began = clock.now()
        push_all(sender, range(1, 9), wait_s=0.5)
        outcomes = [log.outcome(job) for job in range(1, 9)]
        took_s = clock.now() - began
    push_all(sender, [99])

    assert isinstance(log.outcome(99), PushDone)
    expected = {PushFailure.TIMEOUT, PushFailure.LOST}
    assert all(isinstance(o, PushFailed) and o.reason in expected for o in outcomes)
    assert 0.4 < took_s < 3.0
    sender.close()


def test_a_lying_receiver_costs_its_connection():
    """The receiver answers a frame that was not sent, or with an unknown outcome, or ends in
    the middle."""
    for lie in (encode_answer(77, None), b"\xff" * ANSWER_BYTES, b"\0" * 5, b""):
        log = EventLog()
        with _liar(lie) as address:
            sender = Links(far.CONFIG, BlockArray(4, 4096, seed=1), log).connect(address)
            push_all(sender, [0], block_bytes=4096, num_blocks=1)
            outcome = log.outcome(0, 5.0)
            sender.close()

        assert outcome == PushFailed(0, PushFailure.LOST)


def test_a_stalled_connection_does_not_hold_up_other_receivers():
    """Each peer has its own sender, so a hanging peer blocks no other one (lesson 52)."""
    with _liar(None) as address, open_harness(MakeLinks("tcp"), "tcp", 4096) as harness:
        harness.receiver.open(1, [0])
        log = EventLog()
        stuck = Links(far.CONFIG, BlockArray(4, 4096, seed=1), log).connect(address)
        push_all(stuck, [0], block_bytes=4096, num_blocks=1, wait_s=0.3)
        harness.sender().push(harness.push(1, 1, [0]))

        assert harness.done(1) == 4096
        assert log.outcome(0, 5.0) == PushFailed(0, PushFailure.TIMEOUT)
        stuck.close()


def test_a_receiver_that_takes_little_at_a_time_costs_a_push_its_deadline():
    """Bytes move all the time, and the push still fails at its deadline (lesson 52)."""
    with _sipper(None) as address:
        log, clock = EventLog(), SystemClock()
        sender = Links(far.CONFIG, BlockArray(1, 4096, seed=1), log).connect(address)
        pieces = tuple(BlockPiece(0, index, 4096) for index in range(8192))
        deadline_s = clock.now() + 0.3
        sender.push(Push(job=1, lease=1, pieces=pieces, deadline_s=deadline_s))

        assert log.outcome(1, 10.0) == PushFailed(1, PushFailure.TIMEOUT)
        assert clock.now() < deadline_s + 0.5
        sender.close()


def test_a_sender_that_stalls_in_mid_frame_is_cut_off():
    """The connection of a dead peer does not stay open."""
    config = LinkConfig(token=far.CONFIG.token, stall_timeout_s=0.1)
    receiver = Links(config, BlockArray(4, 4096), EventLog()).listen("tcp")
    peer = RawSender(receiver.address, 4096)
    peer.send(peer.frame(0, 1, {0: bytes(4096)})[:100])
    with pytest.raises(LinkBroken):
        peer.answer()
    peer.close()
    receiver.close()


def test_a_sender_that_is_slow_is_not_cut_off():
    """The frame of a slow sender takes far longer than the stall timeout, and the sender never
    pauses for that long."""
    config = LinkConfig(token=far.CONFIG.token, stall_timeout_s=0.2)
    receiver = Links(config, BlockArray(4, 4096), EventLog()).listen("tcp")
    receiver.open(1, [0])
    peer = RawSender(receiver.address, 4096)
    raw = peer.frame(0, 1, {0: bytes(4096)})
    for at in range(0, len(raw), 512):
        Event().wait(0.06)
        peer.send(raw[at : at + 512])

    assert peer.answer() == (0, None)
    peer.close()
    receiver.close()


def push_all(
    sender, jobs, *, wait_s=60.0, block_bytes=far.BLOCK_BYTES, num_blocks=far.NUM_SLOTS
):
    """All blocks to lease 1, once for each job."""
    pieces = pieces_of(range(num_blocks), block_bytes)
    for job in jobs:
        deadline_s = SystemClock().now() + wait_s
        sender.push(Push(job=job, lease=1, pieces=pieces, deadline_s=deadline_s))


class _liar:
    """A receiver with the right token that answers the first frame with `lie`, or never."""

    def __init__(self, lie: bytes | None) -> None:
        self._lie = lie
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._end = Event()
        self._thread = Thread(target=self._serve)

    def __enter__(self) -> str:
        self._thread.start()
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10.0)
        self._listener.close()

    def _serve(self) -> None:
        connected, _ = self._listener.accept()
        stream = Stream(connected)
        check_wait = timeout_check(SystemClock(), 5.0)
        terms = HandshakeTerms("tcp", far.CONFIG.token, 4096)
        ServerHandshake(stream, terms, check_wait).accept()
        self._answer(stream)
        stream.close()

    def _answer(self, stream: Stream) -> None:
        if self._lie is None:
            self._end.wait(20.0)
        else:
            check_wait = timeout_check(SystemClock(), 5.0)
            stream.fill(memoryview(bytearray(64)), check_wait)
            stream.send([self._lie], check_wait)


class _sipper(_liar):
    """A receiver that reads 64 KiB at a time."""

    def _answer(self, stream: Stream) -> None:
        sip = memoryview(bytearray(1 << 16))
        with contextlib.suppress(LinkBroken):
            while not self._end.wait(5e-3):
                stream.receive_some([sip])
