"""The contract of a link, as a function: run it on yours.

    check_link(lambda memory, deliver: MyLinks(…, memory, deliver), "my-link")

Free of pytest. Every rule is an assertion with a sentence; see `docs/links.md`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from headwater.clock import SystemClock
from headwater.disagg.link import (
    BlockMemory,
    BlockPiece,
    Deliver,
    LinkMaker,
    Push,
    PushDone,
    PushFailed,
    PushFailure,
    Sender,
)
from headwater.testing.links import BlockArray, EventLog

_NUM_SLOTS = 24
_WAIT_S = 30.0


MakeLinks = Callable[[BlockMemory, Deliver], LinkMaker]
"""Opens the links of an instance. Called once for the receiver and once for each sender."""


class LinkHarness:
    """A receiver with its memory, and as many senders as a check wants."""

    def __init__(self, make: MakeLinks, link: str, block_bytes: int) -> None:
        self.log = EventLog()
        self.target = BlockArray(_NUM_SLOTS, block_bytes)
        self.source = BlockArray(_NUM_SLOTS, block_bytes, seed=7)
        self.receiver = make(self.target, self.log).listen(link)
        self._make = make
        self._senders: list[Sender] = []

    def sender(self, memory: BlockArray | None = None) -> Sender:
        """One more instance that pushes; from `memory` of its own, or from `source`."""
        links = self._make(self.source if memory is None else memory, self.log)
        self._senders.append(links.connect(self.receiver.address))
        return self._senders[-1]

    def push(
        self, job: int, lease: int, places: Sequence[int], wait_s: float = _WAIT_S
    ) -> Push:
        """Block `i` of the source as block `i` of the lease."""
        block_bytes = self.source.block_bytes
        pieces = tuple(BlockPiece(place, place, block_bytes) for place in places)
        deadline_s = SystemClock().now() + wait_s
        return Push(job=job, lease=lease, pieces=pieces, deadline_s=deadline_s)

    def close(self) -> None:
        self.source.gate.set()
        self.target.gate.set()
        for sender in self._senders:
            sender.close()
        self.receiver.close()

    def failure(self, job: int) -> PushFailure:
        """Why a push failed; waits for it."""
        outcome = self.log.outcome(job)
        assert isinstance(outcome, PushFailed), f"should have failed: {outcome}"
        return outcome.reason

    def done(self, job: int) -> int:
        """How many bytes a push moved; waits for it."""
        outcome = self.log.outcome(job)
        assert isinstance(outcome, PushDone), f"should have been done: {outcome}"
        return outcome.num_bytes

    def untouched(self, slots: Sequence[int]) -> bool:
        return not self.target.rows[list(slots)].any()


def check_link(make: MakeLinks, link: str, *, block_bytes: int = 4096 * 3 + 40) -> None:
    """Run every rule against fresh links."""
    for check in CHECKS:
        with open_rig(make, link, block_bytes) as rig:
            check(rig)


@contextmanager
def open_rig(make: MakeLinks, link: str, block_bytes: int) -> Iterator[LinkHarness]:
    """A rig that is closed afterwards, whatever happens."""
    rig = LinkHarness(make, link, block_bytes)
    try:
        yield rig
    finally:
        rig.close()


def check_blocks_land_in_order_in_the_slots_of_the_lease(rig: LinkHarness) -> None:
    rig.receiver.open(1, [9, 3, 5, 11])
    sender = rig.sender()
    sender.push(rig.push(10, 1, [0, 1]))
    sender.push(rig.push(11, 1, [3, 2]))

    assert rig.done(10) == 2 * rig.source.block_bytes, "the bytes are counted exactly"
    assert rig.done(11) == 2 * rig.source.block_bytes, "the bytes are counted exactly"
    rig.log.await_landed(1, 4)
    assert rig.log.landed(1) == [0, 1, 3, 2], "blocks land in the order of the pushes"
    for place, slot in enumerate([9, 3, 5, 11]):
        same = np.array_equal(rig.target.rows[slot], rig.source.rows[place])
        assert same, "block i of a lease lands in its slot i"
    others = set(range(_NUM_SLOTS)) - {9, 3, 5, 11}
    assert rig.untouched(sorted(others)), "a slot outside the lease was written"
    rig.receiver.fence(1)
    quiet = rig.log.quiet(1)
    assert quiet.num_bytes == 4 * rig.source.block_bytes, "the account is byte-exact"
    assert quiet.blocks == frozenset(range(4)), "the account names every block"


def check_a_partial_block_is_its_leading_bytes(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0])
    push = Push(
        job=1,
        lease=1,
        pieces=(BlockPiece(4, 0, 100),),
        deadline_s=SystemClock().now() + _WAIT_S,
    )
    rig.sender().push(push)

    assert rig.done(1) == 100, "a partial block counts as its bytes"
    rig.log.await_landed(1, 1)
    row = rig.target.rows[0]
    assert np.array_equal(row[:100], rig.source.rows[4][:100]), "its bytes arrive"
    assert not row[100:].any(), "bytes beyond a partial block were written"


def check_a_push_outside_its_lease_touches_nothing(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0, 1])
    sender = rig.sender()
    sender.push(rig.push(1, 2, [0]))
    sender.push(rig.push(2, 1, [2]))
    sender.push(rig.push(3, 1, [0]))

    assert rig.failure(1) is PushFailure.FENCED, "a lease that never was takes nothing"
    assert rig.failure(2) is PushFailure.OUTSIDE, "an index that the lease does not have"
    assert rig.done(3) == rig.source.block_bytes, "a refusal harms no later push"
    assert rig.untouched(range(1, _NUM_SLOTS)), "a refused push has written"


def check_a_block_lands_once(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0, 1])
    sender = rig.sender()
    sender.push(rig.push(1, 1, [0]))
    rig.done(1)
    rig.log.await_landed(1, 1)
    first = rig.target.rows[0].copy()
    rig.source.rows[0] += 1
    sender.push(rig.push(2, 1, [0, 1]))

    assert rig.done(2), "a block that is there already is no failure"
    rig.log.await_landed(1, 2)
    assert rig.log.landed(1) == [0, 1], "a block lands once"
    assert np.array_equal(rig.target.rows[0], first), "a landed block was written again"


def check_after_a_fence_nothing_lands(rig: LinkHarness) -> None:
    """The sender is held up, so that its bytes come when the slots belong to somebody else."""
    rig.receiver.open(1, [0, 1, 2])
    sender = rig.sender()
    sender.push(rig.push(1, 1, [0]))
    rig.done(1)
    rig.source.gate.clear()
    sender.push(rig.push(2, 1, [1, 2]))
    rig.receiver.fence(1)
    rig.receiver.fence(1)
    quiet = rig.log.quiet(1)
    rig.target.rows[:] = 0
    rig.source.gate.set()

    assert quiet.blocks == frozenset({0}), "what landed before the fence is in the account"
    assert rig.failure(2) is PushFailure.FENCED, "a push after the fence is told so"
    assert rig.untouched(range(_NUM_SLOTS)), "bytes landed after the lease was quiet"
    assert len(rig.log.quiets(1)) == 1, "a lease is quiet once"


def check_a_fence_answers_without_any_sender(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0])
    rig.receiver.fence(1)

    assert rig.log.quiet(1, 1.0).num_bytes == 0, "nothing landed"


def check_cancel_gives_up_what_has_not_begun(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0])
    rig.receiver.open(2, [1, 2])
    rig.source.gate.clear()
    sender = rig.sender()
    sender.push(rig.push(1, 1, [0]))
    sender.push(rig.push(2, 2, [0]))
    sender.push(rig.push(3, 2, [1]))
    sender.cancel(2)

    assert rig.failure(2) is PushFailure.CANCELLED, "a cancelled push has an outcome"
    assert rig.failure(3) is PushFailure.CANCELLED, "a cancelled push has an outcome"
    rig.source.gate.set()
    assert rig.done(1), "another lease's push goes on"
    assert rig.untouched([1, 2]), "a cancelled push has written"


def check_a_late_push_fails_at_its_deadline(rig: LinkHarness) -> None:
    rig.receiver.open(1, [0])
    sender = rig.sender()
    sender.push(rig.push(1, 1, [0], wait_s=-1.0))

    assert rig.failure(1) is PushFailure.TIMEOUT, "a push that is late already"
    assert rig.untouched([0]), "a late push has written"


def check_many_leases_at_once(rig: LinkHarness) -> None:
    senders = [rig.sender() for _ in range(3)]
    for lease in range(1, 9):
        rig.receiver.open(lease, range(3 * (lease - 1), 3 * lease))
    for lease in range(1, 9):
        for place in range(3):
            sender = senders[(lease + place) % 3]
            sender.push(rig.push(100 * lease + place, lease, [place]))
    for lease in range(1, 9):
        for place in range(3):
            rig.done(100 * lease + place)
        rig.receiver.fence(lease)
        assert rig.log.quiet(lease).blocks == frozenset(range(3)), "every block of each"
        rows = rig.target.rows[3 * (lease - 1) : 3 * lease]
        assert np.array_equal(rows, rig.source.rows[:3]), "leases got mixed up"


def check_closing_a_sender_ends_every_push(rig: LinkHarness) -> None:
    rig.receiver.open(1, range(_NUM_SLOTS))
    sender = rig.sender()
    jobs = range(40)
    for job in jobs:
        sender.push(rig.push(job, 1, range(job % 7, _NUM_SLOTS)))
    sender.close()
    sender.close()
    sender.push(rig.push(99, 1, [0]))

    for job in (*jobs, 99):
        assert len(rig.log.outcomes(job)) == 1, "close delivers each outcome, once"
    assert rig.failure(99) is PushFailure.CLOSED, "nothing is pushed after close"


def check_closing_a_receiver_ends_everything(rig: LinkHarness) -> None:
    rig.receiver.open(1, range(_NUM_SLOTS))
    rig.receiver.open(2, range(_NUM_SLOTS))
    sender = rig.sender()
    for job in range(20):
        sender.push(rig.push(job, 1 + job % 2, range(_NUM_SLOTS)))
    rig.receiver.close()
    rig.receiver.close()

    rig.log.quiet(1), rig.log.quiet(2)
    rig.target.rows[:] = 0
    for job in range(20):
        rig.log.outcome(job)
        assert len(rig.log.outcomes(job)) == 1, "exactly one outcome"
    assert rig.untouched(range(_NUM_SLOTS)), "bytes landed in a closed receiver"


def check_nobody_there_is_an_outcome(rig: LinkHarness) -> None:
    sender = rig.sender()
    rig.receiver.close()
    sender.push(rig.push(1, 1, [0]))

    gone = (PushFailure.UNREACHABLE, PushFailure.LOST)
    assert rig.failure(1) in gone, "a push to nobody fails"


CHECKS: tuple[Callable[[LinkHarness], None], ...] = (
    check_blocks_land_in_order_in_the_slots_of_the_lease,
    check_a_partial_block_is_its_leading_bytes,
    check_a_push_outside_its_lease_touches_nothing,
    check_a_block_lands_once,
    check_after_a_fence_nothing_lands,
    check_a_fence_answers_without_any_sender,
    check_cancel_gives_up_what_has_not_begun,
    check_a_late_push_fails_at_its_deadline,
    check_many_leases_at_once,
    check_closing_a_sender_ends_every_push,
    check_closing_a_receiver_ends_everything,
    check_nobody_there_is_an_outcome,
)
"""Every rule, for those who want to run them one by one."""
