"""Counts of open connections, in memory that the HTTP workers of one server share.

    bytes 0 to 15   key of the address hash, random for each server
    then a row for each worker: all its connections, and its connections by hash of their address

Each worker writes its own row and reads all rows, so there is no lock and limits hold for the
server as a whole. A new worker clears the row of the one that it replaces. Addresses with the
same hash are counted together; the key is secret, so a client cannot choose them.
"""

import mmap
import os
import secrets
from hashlib import blake2b

import numpy as np

_KEY_BYTES = 16
_NUM_BUCKETS = 1 << 16
_ROW_BYTES = (1 + _NUM_BUCKETS) * 4


def make_counts_file(num_workers: int) -> int:
    """Descriptor of the memory for `num_workers` workers; it has no name."""
    file = os.memfd_create("headwater-connections")
    os.ftruncate(file, _KEY_BYTES + num_workers * _ROW_BYTES)
    os.pwrite(file, secrets.token_bytes(_KEY_BYTES), 0)
    return file


class ConnectionCounts:
    """The counts, as one worker uses them."""

    def __init__(self, file: int, worker: int) -> None:
        """`worker` is the place of this worker, from 0."""
        memory = mmap.mmap(file, 0)
        self._key = memory[:_KEY_BYTES]
        # Aligned numbers of 32 bits are stored in one piece, so a reader never sees half a
        # count.
        self._rows = np.frombuffer(memory, dtype=np.int32, offset=_KEY_BYTES)
        self._rows = self._rows.reshape(-1, 1 + _NUM_BUCKETS)
        self._own = self._rows[worker]
        self._own[:] = 0

    @classmethod
    def alone(cls) -> "ConnectionCounts":
        """The counts of a server with one process."""
        file = make_counts_file(1)
        try:
            return cls(file, 0)
        finally:
            os.close(file)  # the mapping stays

    @property
    def total(self) -> int:
        """Connections of all workers."""
        return int(self._rows[:, 0].sum())

    @property
    def is_alone(self) -> bool:
        """Whether the server has one worker only."""
        return len(self._rows) == 1

    @property
    def lead(self) -> int:
        """How many connections this worker has more than the worker with the fewest."""
        return int(self._own[0] - self._rows[:, 0].min())

    @property
    def num_others(self) -> int:
        """Connections of the other workers."""
        return self.total - int(self._own[0])

    def of(self, address: str) -> int:
        """Connections of all workers from `address`."""
        return int(self._rows[:, self._column(address)].sum())

    def add(self, address: str, change: int) -> None:
        """Count `change` connections of this worker from `address`."""
        self._own[0] += change
        self._own[self._column(address)] += change

    def _column(self, address: str) -> int:
        digest = blake2b(address.encode(), digest_size=4, key=self._key).digest()
        return 1 + int.from_bytes(digest, "big") % _NUM_BUCKETS
