"""A plug-in storage backend whose every call fails."""

from headwater.errors import StorageError
from headwater.storage.memory import MemoryStorage


class DeadStorage(MemoryStorage):
    """Opens, and then never works."""

    def contains(self, runs, *, timeout_s):
        raise StorageError("the server does not answer")

    def write(self, keys, blocks, *, parents, timeout_s):
        raise StorageError("the server does not answer")
