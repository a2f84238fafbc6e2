"""The slab is pinned in the background: pieces that a copy needs come first."""

from threading import Event, Lock

import numpy as np
import pytest

from headwater.device.gpu import pinned
from headwater.device.gpu.pinned import PinnedSlab
from headwater.errors import DeviceError
from headwater.transfer.slab import PAGE_BYTES, HostSlab

SLOTS = 64


class Driver:
    """Stands in for the CUDA driver: pins when it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.go_on = Event()
        self.pinned: dict[int, int] = {}
        self.order: list[int] = []
        self._fails = fails
        self._lock = Lock()

    def enter_thread(self) -> None:
        """See `Runtime`."""

    def pin(self, address: int, num_bytes: int) -> None:
        self.go_on.wait(10)
        if self._fails:
            raise DeviceError("no memory can be locked")
        with self._lock:
            self.pinned[address] = num_bytes
            self.order.append(address)

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> HostSlab:
    monkeypatch.setattr(pinned, "_PIECE_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(pinned, "_NUM_THREADS", 2)
    return HostSlab(SLOTS, PAGE_BYTES)


def test_every_slot_is_pinned_once_and_unpinned(slab: HostSlab) -> None:
    """Pieces are whole slots, side by side; closing twice is safe."""
    driver = Driver()
    whole = PinnedSlab(slab, driver)  # type: ignore[arg-type]  # stands in for it
    driver.go_on.set()

    whole.await_slots(np.arange(SLOTS))

    assert whole.share == 1.0
    pieces = sorted(driver.pinned.items())
    assert [start - whole.base for start, _ in pieces] == list(
        range(0, SLOTS * PAGE_BYTES, 4 * PAGE_BYTES)
    )
    assert sum(size for _, size in pieces) == SLOTS * PAGE_BYTES
    whole.close()
    whole.close()
    assert driver.pinned == {}


def test_the_slot_that_a_copy_waits_for_is_pinned_next(slab: HostSlab) -> None:
    """A copy of the last slot does not wait for all slots before it."""
    driver = Driver()
    whole = PinnedSlab(slab, driver)  # type: ignore[arg-type]
    with whole._changed:
        whole._hurry({15})
    driver.go_on.set()

    whole.await_slots(np.array([SLOTS - 1]))

    last = whole.base + 60 * PAGE_BYTES
    assert last in driver.order[:4], "at most what the two threads had begun came before"
    whole.close()


def test_a_copy_learns_that_memory_cannot_be_pinned(slab: HostSlab) -> None:
    """Lesson 20: the copy fails, and no copy waits for ever."""
    driver = Driver(fails=True)
    driver.go_on.set()
    whole = PinnedSlab(slab, driver)  # type: ignore[arg-type]

    with pytest.raises(DeviceError, match="no memory"):
        whole.await_slots(np.array([3]))
    whole.close()
