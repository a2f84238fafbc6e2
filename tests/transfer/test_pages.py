"""The pages of the host tier exist before blocks are written to them."""

import resource
from itertools import count

from headwater.clock import SystemClock
from headwater.transfer.pages import PageMaker
from headwater.transfer.slab import PAGE_BYTES, HostSlab

_NUM_SLOTS = 2048


class SlowMachine:
    """A clock by which everything takes an hour."""

    def __init__(self) -> None:
        self._hours = count()

    def now(self) -> float:
        return 3600.0 * next(self._hours)


def _faults_of_writing(slab: HostSlab) -> int:
    """Page faults of this thread while it writes one byte to each slot."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    slab.rows[:, 0] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_write_to_a_slot_allocates_no_page():
    """After the thread has ended, the first write to each slot needs no page of the system, and
    blocks that were there before are unchanged."""
    slab = HostSlab(_NUM_SLOTS, PAGE_BYTES, for_ranks=True)
    slab.rows[7] = 42

    pages = PageMaker(slab.memory, SystemClock())
    assert pages.wait(60)

    assert (slab.rows[7] == 42).all()
    assert _faults_of_writing(slab) < _NUM_SLOTS // 10


def test_closing_ends_a_pause():
    """A copier that is closed does not wait until all pages exist: it pauses after each piece for
    as long as the piece took, and closing ends the pause."""
    slab = HostSlab(_NUM_SLOTS, PAGE_BYTES, for_ranks=True)

    pages = PageMaker(slab.memory, SlowMachine())
    pages.close()
    pages.close()

    assert pages.wait(0)
    assert _faults_of_writing(slab) > _NUM_SLOTS // 10
