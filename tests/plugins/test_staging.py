"""Reads into another engine's memory end with their call, whatever storage does."""

from threading import Event

import pytest

from headwater.errors import StorageTimeout, StorageUnavailable
from headwater.plugins.staging import StagedStorage
from headwater.storage import BlockRead
from headwater.storage.memory import MemoryConfig
from headwater.testing.storage import make_block, make_format, make_keys, make_parents
from tests.plugins.backends import SharedMemory
from tests.waiting import until

BYTES = 4096


@pytest.fixture
def store():
    store = SharedMemory(MemoryConfig(), make_format(block_bytes=BYTES))
    keys = make_keys(4)
    blocks = [make_block(key, BYTES) for key in keys]
    store.write(keys, blocks, parents=make_parents(keys), timeout_s=1)
    yield store
    if store.hang is not None:
        store.hang.set()


def test_blocks_arrive_through_staging_memory(store):
    """Whole blocks are copied; an absent block leaves its buffer unchanged."""
    staged = StagedStorage(store, BYTES, slice_blocks=4, num_slices=2)
    keys = [*make_keys(2), *make_keys(1, run="other")]
    into = [memoryview(bytearray(b"\7" * BYTES)) for _ in keys]

    outcomes = staged.read(keys, into, timeout_s=5)

    assert outcomes == [BlockRead.READ, BlockRead.READ, BlockRead.ABSENT]
    assert [bytes(view) for view in into[:2]] == [bytes(make_block(k, BYTES)) for k in keys[:2]]
    assert bytes(into[2]) == b"\7" * BYTES


def test_a_read_that_hangs_never_touches_the_buffer_afterwards(store):
    """The caller gets its timeout; when the call returns later, its bytes are dropped."""
    staged = StagedStorage(store, BYTES, slice_blocks=4, num_slices=1)
    store.hang = Event()
    into = memoryview(bytearray(b"\7" * BYTES))

    with pytest.raises(StorageTimeout) as caught:
        staged.read(make_keys(1), [into], timeout_s=0.05)
    with pytest.raises(StorageUnavailable, match="staging"):
        staged.read(make_keys(1), [into], timeout_s=0.05)
    store.hang.set()

    assert caught.value.quiet is None
    store.hang = None
    until(lambda: staged._free)
    assert bytes(into) == b"\7" * BYTES
    assert staged.read(make_keys(1), [into], timeout_s=5) == [BlockRead.READ]
