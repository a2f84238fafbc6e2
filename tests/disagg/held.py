"""The held fabric as links for the published contract: threads let everything arrive in order."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, RLock, Thread

import numpy as np

from headwater.clock import SystemClock
from headwater.testing.fabric import HeldFabric
from headwater.testing.peers import HeldReceiver, HeldSender

NUM_SLOTS = 24


class Rows:
    """The block memory of a host, as the fabric reads it; waits while the memory blocks its users."""

    def __init__(self, memory) -> None:
        self._memory = memory

    def __getitem__(self, slot):
        return np.frombuffer(self._memory.view(slot), dtype=np.uint8)


class MemoryHost:
    """An instance that consists of its blocks only; all its slots are held."""

    def __init__(self, name, memory, deliver) -> None:
        self.name = name
        self.rows = Rows(memory)
        self.post = deliver

    def held_slots(self):
        return np.arange(NUM_SLOTS)


class Locked:
    """A sender or receiver that waits while the driver uses the fabric."""

    def __init__(self, end, lock) -> None:
        self._end = end
        self._lock = lock

    def __getattr__(self, name):
        method = getattr(self._end, name)
        if not callable(method):
            return method

        def locked(*args):
            with self._lock:
                return method(*args)

        return locked


class HeldLinks:
    """One instance's links in a fabric."""

    def __init__(self, driver, memory, deliver) -> None:
        self._driver = driver
        driver.num_hosts += 1
        self._name = f"host-{driver.num_hosts}"
        with driver.lock:
            driver.fabric.enter(MemoryHost(self._name, memory, deliver), f"held://{self._name}")

    def listen(self, link):
        receiver = HeldReceiver(self._driver.fabric, f"held://{self._name}")
        return Locked(receiver, self._driver.lock)

    def connect(self, address):
        sender = HeldSender(self._driver.fabric, self._name, address)
        return Locked(sender, self._driver.lock)


class Driver:
    """Lets everything in flight arrive, oldest first. Late pushes are dropped."""

    def __init__(self) -> None:
        self.fabric = HeldFabric()
        self.lock = RLock()
        self.num_hosts = 0
        self._ended = Event()

    def links(self, memory, deliver) -> HeldLinks:
        return HeldLinks(self, memory, deliver)

    @contextmanager
    def running(self) -> Iterator[None]:
        """One thread moves blocks and one ends fences, so a blocked sender delays no fence."""
        threads = [Thread(target=self._repeat, args=(do,)) for do in (self._move, self._settle)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def _repeat(self, do) -> None:
        while not self._ended.wait(1e-3):
            do()

    def _settle(self) -> None:
        with self.lock:
            self.fabric.expire(SystemClock().now())
            for transfer in [t for t in self.fabric.transfers if t.is_late]:
                self.fabric.vanish(transfer)
            for entry in list(self.fabric.fences):
                self.fabric.settle_fence(entry)

    def _move(self) -> None:
        """Move blocks one by one. It waits for a blocked sender without holding the lock."""
        while True:
            with self.lock:
                transfer = next((t for t in self.fabric.transfers if not t.is_late), None)
                if transfer is None:
                    return
                slot = transfer.push.pieces[transfer.num_sent].slot
                rows = self.fabric._hosts[transfer.source].rows
            rows[slot]
            self._settle()
            with self.lock:
                if transfer in self.fabric.transfers and not transfer.is_late:
                    self.fabric.move(transfer)
