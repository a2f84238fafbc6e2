"""A storage backend of one's own, and a dead one: every call fails."""

from headwater.errors import StorageError
from headwater.storage.memory import MemoryStorage


class DeadStorage(MemoryStorage):
    """Opens, and then never works."""

    def contains(self, runs, *, timeout_s):
        raise StorageError("nobody is there")

    def write(self, keys, blocks, *, parents, timeout_s):
        raise StorageError("nobody is there")
