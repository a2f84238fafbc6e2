"""Several processes on one directory, killed at any instant."""

import contextlib
import itertools
import random
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from headwater.storage import BlockRead, BlockWrite
from headwater.storage.file.backend import FileStorage
from headwater.testing.storage import make_keys, read_run, write_run
from headwater.types import BlockKey
from tests.search import SCALE
from tests.storage.writer import BLOCK_BYTES, open_writer


def start_writer(path: Path, *arguments: str) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.writer", str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def stop(writer: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    writer.send_signal(number)
    writer.communicate()


def all_keys(storage: FileStorage) -> list[BlockKey]:
    return [entry.key for slab in storage._index.slabs for entry in slab.table.entries()]


def check_whole(path: Path) -> int:
    """Everything that the next process finds is complete and right. Returns the number of blocks."""
    storage = open_writer(str(path))
    keys = all_keys(storage)
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ] * len(keys)
    assert storage.stats().reasons == {}
    storage.check()
    storage.close()
    assert disk_bytes(path) <= 4 << 20
    return len(keys)


def disk_bytes(path: Path) -> int:
    """Bytes of a directory in which files come and go."""
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


@pytest.mark.slow
def test_a_writer_may_be_killed_at_random(tmp_path: Path) -> None:
    """After kill -9 while blocks are written and evicted, every block that is found is whole
    (lesson 40)."""
    chance = random.Random(7)
    found = 0
    for _ in range(12 * min(SCALE, 20)):
        writer = start_writer(tmp_path, "forever")
        Event().wait(chance.random() * 0.04)
        stop(writer)
        found += check_whole(tmp_path)
    assert found > 0, "no writer ever wrote anything"


@pytest.mark.slow
def test_a_writer_may_be_killed_in_the_middle_of_any_write(tmp_path: Path) -> None:
    """Each write to each file is torn in half once: a partial block is never found. The
    directory stays the same, so later writers reuse the slots of earlier ones."""
    for last in itertools.count(1):
        writer = start_writer(tmp_path, "die", str(last))
        told, _ = writer.communicate()
        check_whole(tmp_path)
        if told == "done\n":
            break
        assert writer.returncode == -signal.SIGKILL
    assert last > 16, "a block is four writes: entry cleared, slot, entry, count"


@pytest.mark.slow
def test_processes_that_share_a_directory_share_its_capacity(tmp_path: Path) -> None:
    """Three processes that write and evict all the time never exceed the capacity together
    (lesson 43); the room of a killed one is used by the others."""
    writers = [start_writer(tmp_path, "forever") for _ in range(3)]

    most = max(disk_bytes(tmp_path) for _ in range(300))
    stop(writers.pop())
    most = max(most, *(disk_bytes(tmp_path) for _ in range(300)))
    for writer in writers:
        stop(writer)

    assert 2 << 20 < most <= 4 << 20
    assert check_whole(tmp_path) > 0


@pytest.mark.slow
def test_processes_find_each_others_blocks(tmp_path: Path) -> None:
    """What another process wrote after we opened is found, and never written again."""
    ours = open_writer(str(tmp_path))
    mine, theirs = make_keys(3, run="mine"), make_keys(5, run="theirs")
    write_run(ours, mine, BLOCK_BYTES)
    writer = start_writer(tmp_path, "some", "theirs", "5")
    assert writer.stdout is not None
    writer.stdout.readline()

    assert ours.contains([theirs], timeout_s=5)[0] == 5
    assert read_run(ours, theirs, BLOCK_BYTES) == [BlockRead.READ] * 5
    assert write_run(ours, theirs, BLOCK_BYTES) == [BlockWrite.PRESENT] * 5
    assert ours.remove(theirs, timeout_s=5) == 0, "they are not ours to remove"
    stop(writer)
    ours.close()


@pytest.mark.slow
def test_the_slabs_of_a_dead_owner_are_taken_over(tmp_path: Path) -> None:
    """While the owner lives the slabs are its own; after kill -9 the next process may write to
    them."""
    theirs = make_keys(5, run="theirs")
    writer = start_writer(tmp_path, "some", "theirs", "5")
    assert writer.stdout is not None
    writer.stdout.readline()
    reader = open_writer(str(tmp_path))
    assert reader.stats().num_blocks == 0
    assert reader.contains([theirs], timeout_s=5)[0] == 5
    stop(writer)

    heir = open_writer(str(tmp_path))

    assert heir.stats().num_blocks == 5
    assert read_run(reader, theirs, BLOCK_BYTES) == [BlockRead.READ] * 5
    assert heir.remove(theirs, timeout_s=5) == 5
    assert reader.contains([theirs], timeout_s=5)[0] == 0
    reader.close()
    heir.close()


@pytest.mark.slow
def test_a_slot_reused_under_a_reader_is_a_miss(tmp_path: Path) -> None:
    """Another process overwrites what this one reads, all the time, and no wrong byte is read
    (lesson 44). `read_run` checks the bytes of every block reported as read. A block that
    disappeared is absent, not damaged."""
    writer = start_writer(tmp_path, "forever")
    ours = open_writer(str(tmp_path))
    outcomes: set[BlockRead] = set()
    while len(outcomes) < 2:
        ours.contains([make_keys(1, run="nothing")], timeout_s=5)[0]
        keys = list(ours._index._theirs)
        outcomes.update(read_run(ours, keys, BLOCK_BYTES))
    stop(writer)

    assert outcomes == {BlockRead.READ, BlockRead.ABSENT}
    ours.close()
