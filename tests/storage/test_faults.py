"""The doubles follow their script."""

import pytest

from headwater.errors import StorageError, StorageTimeout
from headwater.storage import BlockRead, BlockWrite
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.faults import Fault, FaultyStorage, damage
from headwater.testing.media import MemoryMedium
from headwater.testing.storage import (
    make_block,
    make_format,
    make_keys,
    make_parents,
    read_run,
    write_run,
)

BLOCK_BYTES = 64


def make_double(**script: list[Fault | None]) -> FaultyStorage:
    memory = MemoryStorage(MemoryConfig(), make_format(block_bytes=BLOCK_BYTES))
    return FaultyStorage(memory, script)


def test_the_nth_call_gets_the_nth_fault() -> None:
    """Calls are counted separately for each method; after the script everything works."""
    double = make_double(contains=[None, Fault.ERROR], read=[Fault.TIMEOUT])
    keys = make_keys(2)
    write_run(double, keys, BLOCK_BYTES)

    assert double.contains([keys], timeout_s=1)[0] == 2
    with pytest.raises(StorageError):
        double.contains([keys], timeout_s=1)[0]
    with pytest.raises(StorageTimeout) as caught:
        read_run(double, keys, BLOCK_BYTES)
    assert caught.value.quiet is None
    assert double.contains([keys], timeout_s=1)[0] == 2


def test_a_hang_does_its_work_late() -> None:
    """The buffer is written after the deadline and before `quiet`: callers must survive
    that."""
    double = make_double(read=[Fault.HANG])
    [key] = make_keys(1)
    write_run(double, [key], BLOCK_BYTES)
    into = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(StorageTimeout) as caught:
        double.read([key], [into], timeout_s=0.01)
    assert into == bytes(BLOCK_BYTES)

    double.release()

    assert caught.value.quiet is not None
    assert caught.value.quiet.wait(5)
    assert into == make_block(key, BLOCK_BYTES)


def test_a_write_that_fails_half_way_leaves_the_first_half() -> None:
    """After that write every call fails until the double is revived."""
    double = make_double(write=[Fault.DIES])
    keys = make_keys(4)
    with pytest.raises(StorageError, match="died in the middle"):
        write_run(double, keys, BLOCK_BYTES)
    with pytest.raises(StorageError):
        double.contains([keys], timeout_s=1)[0]

    double.revive()

    assert double.contains([keys], timeout_s=1)[0] == 2
    assert read_run(double, keys[:2], BLOCK_BYTES) == [BlockRead.READ] * 2


def test_a_full_medium_refuses_writes() -> None:
    """Writes are refused without an error."""
    double = make_double(write=[Fault.REFUSED])

    assert write_run(double, make_keys(2), BLOCK_BYTES) == [BlockWrite.REFUSED] * 2
    assert write_run(double, make_keys(2), BLOCK_BYTES) == [BlockWrite.WRITTEN] * 2


def test_memory_evicts_the_tail_of_the_oldest_run() -> None:
    """The reference is bounded too (lesson 43)."""
    form = make_format(block_bytes=BLOCK_BYTES)
    memory = MemoryStorage(MemoryConfig(capacity_bytes=5 * BLOCK_BYTES), form)
    old, new = make_keys(3, run="old"), make_keys(3, run="new")
    blocks = [make_block(key, BLOCK_BYTES) for key in old + new]

    memory.write(old, blocks[:3], parents=make_parents(old), timeout_s=1)
    memory.write(new, blocks[3:], parents=make_parents(new), timeout_s=1)

    assert memory.contains([old], timeout_s=1)[0] == 2
    assert memory.contains([new], timeout_s=1)[0] == 3
    assert memory.stats().blocks_evicted == 1
    tiny = MemoryStorage(MemoryConfig(capacity_bytes=1), form)
    assert write_run(tiny, old, BLOCK_BYTES) == [BlockWrite.REFUSED] * 3


def test_a_damaged_block_of_another_model_never_becomes_valid_again() -> None:
    """A soak damages the same block several times: a block that became valid again would be
    reported as wrong tokens."""
    memory = MemoryStorage(MemoryConfig(), make_format(block_bytes=BLOCK_BYTES))
    [key] = make_keys(1)
    write_run(memory, [key], BLOCK_BYTES)
    damage(MemoryMedium(memory), [key], Fault.FLIPPED_BIT)

    for _ in range(4):
        damage(MemoryMedium(memory), [key], Fault.OTHER_MODEL)
        stored = memory.values[key]
        into = memoryview(bytearray(BLOCK_BYTES))
        assert memory.read([key], [into], timeout_s=1) == [BlockRead.DAMAGED]
        memory.values[key] = stored
