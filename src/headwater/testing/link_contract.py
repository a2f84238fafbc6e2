"""The contract of a link, as a function that you can run on your own link.

    check_link(lambda memory, deliver: MyLinks(…, memory, deliver), "my-link")

It does not need pytest. Every rule is an assertion with a message; see `docs/links.md`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

import numpy as np

from headwater.clock import SystemClock
from headwater.disagg.links.interface import BlockMemory, Deliver, LinkMaker, Sender
from headwater.disagg.protocol.push import BlockPiece, Push, PushDone, PushFailed, PushFailure
from headwater.testing.links import BlockArray, EventLog

_NUM_SLOTS = 24
_WAIT_S = 30.0


MakeLinks = Callable[[BlockMemory, Deliver], LinkMaker]
"""Opens the links of an instance. Called once for the receiver and once for each sender."""


class LinkHarness:
    """A receiver with its memory, and any number of senders."""

    def __init__(self, make: MakeLinks, link: str, block_bytes: int) -> None:
        self.log = EventLog()
        self.target = BlockArray(_NUM_SLOTS, block_bytes)
        self.source = BlockArray(_NUM_SLOTS, block_bytes, seed=7)
        self.receiver = make(self.target, self.log).listen(link)
        self._make = make
        self._senders: list[Sender] = []

    def sender(self, memory: BlockArray | None = None) -> Sender:
        """Another instance that pushes, from its own `memory` or from `source`."""
        links = self._make(self.source if memory is None else memory, self.log)
        self._senders.append(links.connect(self.receiver.address))
        return self._senders[-1]

    def push(
        self, job: int, lease: int, indices: Sequence[int], wait_s: float = _WAIT_S
    ) -> Push:
        """Push block `i` of the source as block `i` of the lease."""
        block_bytes = self.source.block_bytes
        pieces = tuple(BlockPiece(index, index, block_bytes) for index in indices)
        deadline_s = SystemClock().now() + wait_s
        return Push(job=job, lease=lease, pieces=pieces, deadline_s=deadline_s)

    def close(self) -> None:
        self.source.gate.set()
        self.target.gate.set()
        for sender in self._senders:
            sender.close()
        self.receiver.close()

    def failure(self, job: int) -> PushFailure:
        """Why a push failed; waits for its end."""
        outcome = self.log.outcome(job)
        assert isinstance(outcome, PushFailed), f"should have failed: {outcome}"
        return outcome.reason

    def done(self, job: int) -> int:
        """How many bytes a push moved; waits for its end."""
        outcome = self.log.outcome(job)
        assert isinstance(outcome, PushDone), f"should have been done: {outcome}"
        return outcome.num_bytes

    def untouched(self, slots: Sequence[int]) -> bool:
        return not self.target.rows[list(slots)].any()


def check_link(make: MakeLinks, link: str, *, block_bytes: int = 4096 * 3 + 40) -> None:
    """Run every rule with new links."""
    for check in CHECKS:
        with open_harness(make, link, block_bytes) as harness:
            check(harness)


@contextmanager
def open_harness(make: MakeLinks, link: str, block_bytes: int) -> Iterator[LinkHarness]:
    """A harness that is closed afterwards in any case."""
    harness = LinkHarness(make, link, block_bytes)
    try:
        yield harness
    finally:
        harness.close()


def check_blocks_arrive_in_order_in_the_slots_of_the_lease(harness: LinkHarness) -> None:
    harness.receiver.open(1, [9, 3, 5, 11])
    sender = harness.sender()
    sender.push(harness.push(10, 1, [0, 1]))
    sender.push(harness.push(11, 1, [3, 2]))

    assert harness.done(10) == 2 * harness.source.block_bytes, "the byte count is wrong"
    assert harness.done(11) == 2 * harness.source.block_bytes, "the byte count is wrong"
    harness.log.await_received(1, 4)
    assert harness.log.received(1) == [0, 1, 3, 2], (
        "blocks did not arrive in the order of the pushes"
    )
    for index, slot in enumerate([9, 3, 5, 11]):
        same = np.array_equal(harness.target.rows[slot], harness.source.rows[index])
        assert same, "block i of a lease is not in its slot i"
    others = set(range(_NUM_SLOTS)) - {9, 3, 5, 11}
    assert harness.untouched(sorted(others)), "a slot outside the lease was written"
    harness.receiver.fence(1)
    closed = harness.log.closed(1)
    assert closed.num_bytes == 4 * harness.source.block_bytes, "the final byte count is wrong"
    assert closed.blocks == frozenset(range(4)), "the final event does not name every block"


def check_a_partial_block_is_its_leading_bytes(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0])
    push = Push(
        job=1,
        lease=1,
        pieces=(BlockPiece(4, 0, 100),),
        deadline_s=SystemClock().now() + _WAIT_S,
    )
    harness.sender().push(push)

    assert harness.done(1) == 100, "the byte count of a partial block is wrong"
    harness.log.await_received(1, 1)
    row = harness.target.rows[0]
    assert np.array_equal(row[:100], harness.source.rows[4][:100]), (
        "the bytes of a partial block are wrong"
    )
    assert not row[100:].any(), "bytes beyond a partial block were written"


def check_a_push_outside_its_lease_touches_nothing(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0, 1])
    sender = harness.sender()
    sender.push(harness.push(1, 2, [0]))
    sender.push(harness.push(2, 1, [2]))
    sender.push(harness.push(3, 1, [0]))

    assert harness.failure(1) is PushFailure.FENCED, (
        "a push to a lease that was never opened was not refused"
    )
    assert harness.failure(2) is PushFailure.OUTSIDE, (
        "a push of a block outside the lease was not refused"
    )
    assert harness.done(3) == harness.source.block_bytes, (
        "a push failed because an earlier one was refused"
    )
    assert harness.untouched(range(1, _NUM_SLOTS)), "a refused push wrote to a slot"


def check_a_block_is_received_once(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0, 1])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    harness.done(1)
    harness.log.await_received(1, 1)
    first = harness.target.rows[0].copy()
    harness.source.rows[0] += 1
    sender.push(harness.push(2, 1, [0, 1]))

    assert harness.done(2), "a push failed because a block was received before"
    harness.log.await_received(1, 2)
    assert harness.log.received(1) == [0, 1], "a block was reported as received twice"
    assert np.array_equal(harness.target.rows[0], first), "a received block was written again"


def check_after_a_fence_nothing_is_written(harness: LinkHarness) -> None:
    """The sender is delayed until its target slots belong to another lease."""
    harness.receiver.open(1, [0, 1, 2])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    harness.done(1)
    harness.source.gate.clear()
    sender.push(harness.push(2, 1, [1, 2]))
    harness.receiver.fence(1)
    harness.receiver.fence(1)
    closed = harness.log.closed(1)
    harness.target.rows[:] = 0
    harness.source.gate.set()

    assert closed.blocks == frozenset({0}), (
        "the final event does not name exactly the blocks received before the fence"
    )
    assert harness.failure(2) is PushFailure.FENCED, (
        "a push after the fence did not fail as fenced"
    )
    assert harness.untouched(range(_NUM_SLOTS)), "bytes were written after the lease was closed"
    assert len(harness.log.closings(1)) == 1, "a lease was not closed exactly once"


def check_a_fence_answers_without_any_sender(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0])
    harness.receiver.fence(1)

    assert harness.log.closed(1, 1.0).num_bytes == 0, (
        "a lease without a sender reports received bytes"
    )


def check_cancel_gives_up_what_has_not_begun(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0])
    harness.receiver.open(2, [1, 2])
    harness.source.gate.clear()
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    sender.push(harness.push(2, 2, [0]))
    sender.push(harness.push(3, 2, [1]))
    sender.cancel(2)

    assert harness.failure(2) is PushFailure.CANCELLED, "a push was not cancelled"
    assert harness.failure(3) is PushFailure.CANCELLED, "a push was not cancelled"
    harness.source.gate.set()
    assert harness.done(1), "a push of another lease was cancelled"
    assert harness.untouched([1, 2]), "a cancelled push wrote to a slot"


def check_a_late_push_fails_at_its_deadline(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0], wait_s=-1.0))

    assert harness.failure(1) is PushFailure.TIMEOUT, (
        "a push whose deadline has passed did not time out"
    )
    assert harness.untouched([0]), "a push whose deadline has passed wrote to a slot"


def check_a_deadline_can_be_extended(harness: LinkHarness) -> None:
    harness.receiver.open(1, [0, 1])
    harness.target.gate.clear()
    sender = harness.sender()
    push = harness.push(1, 1, [0, 1], wait_s=0.3)
    sender.push(push)
    sender.extend(1, push.deadline_s + _WAIT_S)
    sender.extend(1, push.deadline_s)
    clock, pause = SystemClock(), Event()
    while clock.now() < push.deadline_s + 0.1:
        pause.wait(0.02)
    harness.target.gate.set()

    assert harness.done(1), "a push failed before its extended deadline"


def check_many_leases_at_once(harness: LinkHarness) -> None:
    senders = [harness.sender() for _ in range(3)]
    for lease in range(1, 9):
        harness.receiver.open(lease, range(3 * (lease - 1), 3 * lease))
    for lease in range(1, 9):
        for index in range(3):
            sender = senders[(lease + index) % 3]
            sender.push(harness.push(100 * lease + index, lease, [index]))
    for lease in range(1, 9):
        for index in range(3):
            harness.done(100 * lease + index)
        harness.receiver.fence(lease)
        assert harness.log.closed(lease).blocks == frozenset(range(3)), (
            "a lease is missing blocks"
        )
        rows = harness.target.rows[3 * (lease - 1) : 3 * lease]
        assert np.array_equal(rows, harness.source.rows[:3]), (
            "a slot has the block of another lease"
        )


def check_closing_a_sender_ends_every_push(harness: LinkHarness) -> None:
    harness.receiver.open(1, range(_NUM_SLOTS))
    sender = harness.sender()
    jobs = range(40)
    for job in jobs:
        sender.push(harness.push(job, 1, range(job % 7, _NUM_SLOTS)))
    sender.close()
    sender.close()
    sender.push(harness.push(99, 1, [0]))

    for job in (*jobs, 99):
        assert len(harness.log.outcomes(job)) == 1, (
            "a push does not have exactly one outcome after close"
        )
    assert harness.failure(99) is PushFailure.CLOSED, "a push after close was not refused"


def check_closing_a_receiver_ends_everything(harness: LinkHarness) -> None:
    harness.receiver.open(1, range(_NUM_SLOTS))
    harness.receiver.open(2, range(_NUM_SLOTS))
    sender = harness.sender()
    for job in range(20):
        sender.push(harness.push(job, 1 + job % 2, range(_NUM_SLOTS)))
    harness.receiver.close()
    harness.receiver.close()

    harness.log.closed(1), harness.log.closed(2)
    harness.target.rows[:] = 0
    for job in range(20):
        harness.log.outcome(job)
        assert len(harness.log.outcomes(job)) == 1, "a push does not have exactly one outcome"
    assert harness.untouched(range(_NUM_SLOTS)), (
        "bytes were written after the receiver was closed"
    )


def check_a_push_without_a_receiver_fails(harness: LinkHarness) -> None:
    sender = harness.sender()
    harness.receiver.close()
    sender.push(harness.push(1, 1, [0]))

    gone = (PushFailure.UNREACHABLE, PushFailure.LOST)
    assert harness.failure(1) in gone, "a push to an address without a receiver did not fail"


CHECKS: tuple[Callable[[LinkHarness], None], ...] = (
    check_blocks_arrive_in_order_in_the_slots_of_the_lease,
    check_a_partial_block_is_its_leading_bytes,
    check_a_push_outside_its_lease_touches_nothing,
    check_a_block_is_received_once,
    check_after_a_fence_nothing_is_written,
    check_a_fence_answers_without_any_sender,
    check_cancel_gives_up_what_has_not_begun,
    check_a_late_push_fails_at_its_deadline,
    check_a_deadline_can_be_extended,
    check_many_leases_at_once,
    check_closing_a_sender_ends_every_push,
    check_closing_a_receiver_ends_everything,
    check_a_push_without_a_receiver_fails,
)
"""All rules, to be run one by one."""
