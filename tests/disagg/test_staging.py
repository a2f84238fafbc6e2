"""Blocks of a device pass through buffers: the same contract, and no buffer is ever lost."""

import gc
import weakref
from threading import Event, Thread

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.disagg.links.registry import Links
from headwater.disagg.links.staging.receiver import StagedReceiver
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.links.staging.sender import StagedSender
from headwater.disagg.protocol.push import Push, PushDone, PushFailure
from headwater.errors import ConfigError
from headwater.testing.link_contract import CHECKS, open_harness
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.staging_doubles import ArrayCopier, MakeStaged, SomeBuffers
from tests.disagg.wire import CONFIG, STAGED_LINKS, RawSender, pieces_of

BLOCK_BYTES = 4096
NUM_SLOTS = 24
SIZES = (4096 * 3 + 40, 3 << 20)


@pytest.mark.parametrize("block_bytes", SIZES, ids=("small", "large"))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("link", STAGED_LINKS)
def test_staged_links_keep_the_contract(link, check, block_bytes):
    """Staged links keep the order, one outcome per push, and fences (lesson 50)."""
    with open_harness(MakeStaged(link), link, block_bytes) as harness:
        check(harness)


@pytest.mark.parametrize("end", ["receiver", "sender"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("link", ["tcp", "shm"])
def test_one_end_may_have_its_blocks_in_place(link, check, end):
    """A device on one side and main memory on the other is a link like any other."""
    with open_harness(MakeStaged(link, (end,)), link, BLOCK_BYTES) as harness:
        check(harness)


class Pair:
    """A staged sender and a staged receiver with a few buffers each."""

    def __init__(self, num_buffers: int = 4) -> None:
        self.hold = lambda event: None
        """Blocks the delivery of events of the sender."""

        self.source = BlockArray(NUM_SLOTS, BLOCK_BYTES, seed=7)
        self.target = BlockArray(NUM_SLOTS, BLOCK_BYTES)
        self.log = EventLog()
        self.inner = SomeBuffers(self.target, num_buffers)
        self.receiver = StagedReceiver(
            lambda memory, deliver: Links(CONFIG, memory, deliver).listen("tcp"),
            self.inner,
            self.log,
            timeout_s=1.0,
        )
        self.outer = SomeBuffers(self.source, num_buffers)
        self.sender = self.make_sender(self.outer)

    def make_sender(self, buffers: SomeBuffers) -> StagedSender:
        return StagedSender(
            lambda deliver: Links(CONFIG, buffers, deliver).connect(self.receiver.address),
            buffers,
            self.take,
            SystemClock(),
            part_blocks=2,
        )

    def take(self, event) -> None:
        self.hold(event)
        self.log(event)

    def push(self, job: int, lease: int, indices, wait_s: float = 30.0) -> None:
        deadline_s = SystemClock().now() + wait_s
        pieces = pieces_of(indices, BLOCK_BYTES)
        self.sender.push(Push(job=job, lease=lease, pieces=pieces, deadline_s=deadline_s))

    def close(self) -> None:
        self.outer.copier.gate.set()
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_a_push_larger_than_all_buffers_passes_through_them(pair):
    """The push is sent part by part; every buffer is free afterwards."""
    pair.receiver.open(1, range(NUM_SLOTS))
    pair.push(1, 1, range(NUM_SLOTS))

    assert pair.log.outcome(1) == PushDone(1, NUM_SLOTS * BLOCK_BYTES)
    pair.receiver.fence(1)
    assert pair.log.closed(1).num_bytes == NUM_SLOTS * BLOCK_BYTES
    assert np.array_equal(pair.target.rows, pair.source.rows)
    assert pair.outer.all_free
    assert pair.inner.all_free


def test_a_block_is_received_when_it_is_on_the_device(pair):
    """While a block is only in a buffer, it is not reported, and the lease is not closed
    (lesson 46)."""
    pair.receiver.open(1, [5])
    pair.inner.copier.gate.clear()
    pair.push(1, 1, [0])
    assert pair.log.outcome(1) == PushDone(1, BLOCK_BYTES)
    pair.receiver.fence(1)

    assert pair.log.received(1) == []
    assert pair.log.closings(1) == []
    pair.inner.copier.gate.set()
    assert pair.log.closed(1).blocks == frozenset({0})
    assert pair.log.received(1) == [0]
    assert np.array_equal(pair.target.rows[5], pair.source.rows[0])


def test_a_failed_copy_is_not_in_the_byte_count(pair):
    """A block that arrived but is not on the device does not count as received (lesson 54)."""
    pair.receiver.open(1, [5, 6])
    pair.push(1, 1, [0])
    pair.log.await_received(1, 1)
    pair.inner.copier.fails = True
    pair.push(2, 1, [1])
    pair.log.outcome(2)
    pair.receiver.fence(1)

    closed = pair.log.closed(1)
    assert (closed.num_bytes, closed.blocks) == (BLOCK_BYTES, frozenset({0}))
    assert pair.log.received(1) == [0]
    assert pair.inner.all_free


def test_a_copy_that_fails_ends_its_lease(pair):
    """The sender believes that the push succeeded; the receiver is told of the failed copy
    (lesson 53)."""
    pair.receiver.open(1, [5, 6])
    pair.inner.copier.fails = True
    pair.push(1, 1, [0])

    assert pair.log.outcome(1) == PushDone(1, BLOCK_BYTES)
    assert pair.log.closed(1).blocks == frozenset()
    pair.push(2, 1, [1])
    assert pair.log.outcome(2) == (2, PushFailure.FENCED)
    pair.receiver.fence(1)
    assert len(pair.log.closings(1)) == 1
    assert pair.inner.all_free


def test_a_copy_that_fails_fails_its_push_and_no_other(pair):
    """The sender's device could not be read: nothing of that part is sent (lesson 53)."""
    pair.receiver.open(1, range(8))
    pair.outer.copier.fails = True
    pair.push(1, 1, [0, 1, 2, 3, 4])

    assert pair.log.outcome(1) == (1, PushFailure.LOST)
    pair.outer.copier.fails = False
    pair.push(2, 1, [5])
    assert pair.log.outcome(2) == PushDone(2, BLOCK_BYTES)
    pair.log.await_received(1, 1)
    assert pair.log.received(1) == [5]
    assert pair.outer.all_free


def test_a_copy_that_cannot_begin_has_failed(pair):
    """At both ends, the push and the lease end although the copy could not begin (lesson
    53)."""
    pair.receiver.open(1, range(8))
    pair.outer.copier.refuses = True
    pair.push(1, 1, [0])
    assert pair.log.outcome(1) == (1, PushFailure.LOST)
    pair.outer.copier.refuses, pair.inner.copier.refuses = False, True
    pair.push(2, 1, [1])
    assert pair.log.outcome(2) == PushDone(2, BLOCK_BYTES)
    pair.receiver.fence(1)

    assert pair.log.closed(1).blocks == frozenset()
    assert pair.outer.all_free
    assert pair.inner.all_free


def test_a_push_that_waits_for_its_copy_is_late_in_time(pair):
    """At the deadline of the push its slots are still being read, so they are not released yet
    (lesson 50)."""
    pair.receiver.open(1, range(8))
    pair.outer.copier.gate.clear()
    pair.push(1, 1, [0, 1, 2], wait_s=0.05)
    pair.push(2, 1, [3])
    deadline_s = SystemClock().now() + 0.1
    while SystemClock().now() < deadline_s:
        assert pair.log.outcomes(1) == []
    pair.outer.copier.gate.set()

    assert pair.log.outcome(1) == (1, PushFailure.TIMEOUT)
    assert pair.log.outcome(2) == PushDone(2, BLOCK_BYTES)
    pair.log.await_received(1, 1)
    assert pair.log.received(1) == [3]
    assert pair.outer.all_free


def test_a_push_that_waits_for_its_turn_ends_at_its_deadline(pair):
    """No copy reads the slots of the waiting push, so the push ends however long the copy
    before it takes."""
    pair.outer.copier.gate.clear()
    pair.push(1, 1, [0, 1, 2])
    pair.push(2, 1, [3], wait_s=0.05)

    assert pair.log.outcome(2, 5.0) == (2, PushFailure.TIMEOUT)
    assert pair.log.outcomes(1) == []
    assert pair.outer.copier.num_started == 2


def test_closing_ends_what_waits_and_what_is_copied(pair):
    """Each push has one outcome, and the sender's slots are not read afterwards."""
    pair.receiver.open(1, range(8))
    pair.outer.copier.gate.clear()
    pair.push(1, 1, [0, 1, 2])
    pair.push(2, 1, [3])
    pair.outer.copier.gate.set()
    pair.sender.close()
    pair.sender.close()
    pair.push(3, 1, [4])

    for job in (1, 2):
        assert len(pair.log.outcomes(job)) == 1
    assert pair.log.outcome(3) == (3, PushFailure.CLOSED)
    assert pair.outer.all_free


def test_a_push_ends_once_though_deadline_and_cancel_meet(pair):
    """The deadline comes while `cancel` is about to end the push (lesson 53)."""
    pair.hold = lambda event: event.job == 2 and pair.log.outcome(3)
    pair.outer.copier.gate.clear()
    pair.push(1, 1, [0, 1, 2])
    pair.push(2, 9, [1])
    pair.push(3, 9, [2], wait_s=0.1)
    pair.sender.cancel(9)

    assert pair.log.outcomes(2) == [(2, PushFailure.CANCELLED)]
    assert pair.log.outcomes(3) == [(3, PushFailure.TIMEOUT)]


def test_every_outcome_is_delivered_before_close_returns(pair):
    """The outcome of a copy in progress is delivered too, however long its delivery takes."""
    pair.hold = lambda event: Event().wait(0.1)
    pair.outer.copier.gate.clear()
    pair.push(1, 1, [0])
    closing = Thread(target=pair.sender.close)
    closing.start()
    pair.outer.copier.gate.set()
    closing.join()

    assert len(pair.log.outcomes(1)) == 1


def test_parts_are_pushed_in_order_though_their_copies_end_out_of_order(pair, monkeypatch):
    """Two parts are copied at a time, by two threads of the copier."""
    reports = []
    monkeypatch.setattr(pair.outer, "load", lambda slots, buffers, told: reports.append(told))
    pair.receiver.open(1, range(4))
    pair.push(1, 1, range(4))
    end_s = SystemClock().now() + 10.0
    while len(reports) < 2:
        assert SystemClock().now() < end_s, "the second part was not begun"
    reports[1](True)
    assert not pair.sender._travelling, "the first part has not ended"
    reports[0](True)
    pair.log.await_received(1, 4)

    assert pair.log.received(1) == [0, 1, 2, 3]


def test_a_push_of_nothing_is_done(pair):
    """A push without blocks is done at once, as on a link without buffers."""
    pair.push(1, 1, [])

    assert pair.log.outcome(1) == PushDone(1, 0)


def test_blocks_that_arrive_damaged_keep_no_buffer(pair):
    """The buffer of damaged blocks is used when they are sent again, and is free when the lease
    ends."""
    pair.receiver.open(1, [3, 4])
    peer = RawSender(pair.receiver.address, BLOCK_BYTES)
    block = pair.source.rows[0].tobytes()
    peer.send(peer.frame(0, 1, {0: block}, flip=11))
    assert peer.answer() == (0, PushFailure.DAMAGED)
    peer.send(peer.frame(1, 1, {0: block}))
    assert peer.answer() == (1, None)
    peer.send(peer.frame(2, 1, {1: block}, flip=11))
    assert peer.answer() == (2, PushFailure.DAMAGED)
    pair.receiver.fence(1)

    assert pair.log.closed(1).blocks == frozenset({0})
    assert pair.inner.all_free
    peer.close()


def test_a_frame_that_finds_no_buffer_costs_its_connection_and_the_lease_ends(pair):
    """Copies hang: no thread waits for ever, and a fence still ends (lesson 52)."""
    pair.receiver.open(1, range(8))
    pair.inner.copier.gate.clear()
    pair.push(1, 1, range(6), wait_s=5.0)

    assert pair.log.outcome(1) == (1, PushFailure.LOST)
    pair.receiver.fence(1)
    pair.inner.copier.gate.set()
    assert pair.log.closed(1).blocks == frozenset(range(4))
    assert pair.inner.all_free


@pytest.mark.parametrize("closed", [False, True])
def test_a_fence_does_not_wait_for_buffers(pair, closed):
    """A frame that finds no buffer is refused and its lease is closed; the lease with slow
    copies is not."""
    pair.receiver.open(1, range(8))
    pair.receiver.open(2, range(8, 16))
    pair.inner.copier.gate.clear()
    pair.push(1, 1, range(4))
    pair.log.outcome(1)
    pair.push(2, 2, [4, 5])
    pair.inner.await_waiting()
    began_s = SystemClock().now()
    pair.receiver.close() if closed else pair.receiver.fence(2)

    assert pair.log.closed(2).blocks == frozenset()
    assert SystemClock().now() - began_s < 0.5
    if not closed:
        assert pair.log.outcome(2) == (2, PushFailure.FENCED)
    pair.inner.copier.gate.set()
    pair.receiver.fence(1)
    assert pair.log.closed(1).blocks == frozenset(range(4))
    assert pair.inner.all_free


def test_senders_do_not_take_each_others_buffers():
    """A sender with a slow device delays no other (lesson 52)."""
    pair = Pair()
    pair.receiver.open(1, range(8))
    pair.outer.copier.gate.clear()
    pair.push(1, 1, range(4))
    others = SomeBuffers(pair.source, 4)
    pair.sender, slow = pair.make_sender(others), pair.sender
    pair.push(2, 1, [6])

    assert pair.log.outcome(2) == PushDone(2, BLOCK_BYTES)
    pair.outer.copier.gate.set()
    assert pair.log.outcome(1) == PushDone(1, 4 * BLOCK_BYTES)
    slow.close()
    pair.close()


@pytest.mark.parametrize("link", ["tcp", "shm"])
def test_a_sender_that_was_closed_keeps_no_memory(link):
    """Buffers of a sender are freed with it, not by a later garbage collection."""
    source, slabs, log = BlockArray(4, BLOCK_BYTES), [], EventLog()

    def open_copier(slab):
        slabs.append(weakref.ref(slab))
        return ArrayCopier(source, slab)

    receiver = Links(CONFIG, BlockArray(4, BLOCK_BYTES), log).listen(link)
    receiver.open(1, range(4))
    gc.disable()
    try:
        links = StagedLinks(CONFIG, BLOCK_BYTES, open_copier, log)
        sender = links.connect(receiver.address)
        deadline_s = SystemClock().now() + 10.0
        pieces = pieces_of(range(4), BLOCK_BYTES)
        sender.push(Push(job=1, lease=1, pieces=pieces, deadline_s=deadline_s))
        assert log.outcome(1) == PushDone(1, 4 * BLOCK_BYTES)
        sender.close()
        del sender
        while slabs[0]() is not None:
            assert SystemClock().now() < deadline_s, "a closed sender keeps its buffers"
    finally:
        gc.enable()
        receiver.close()


@pytest.mark.parametrize("make", ["listen", "connect"])
def test_an_invalid_link_leaves_nothing_behind(make):
    """There is an error message, as without buffers, and the copier is closed (lesson 61)."""
    array, copiers = BlockArray(1, BLOCK_BYTES), []

    def open_copier(slab):
        copiers.append(ArrayCopier(array, slab))
        return copiers[-1]

    links = StagedLinks(CONFIG, BLOCK_BYTES, open_copier, EventLog())
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        getattr(links, make)("carrier-pigeon://loft")

    assert [copier.is_closed for copier in copiers] == [True]
