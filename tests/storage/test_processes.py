"""Several processes on one directory, killed at any instant."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from headwater.clock import SystemClock
from headwater.storage import BlockRead, BlockWrite
from headwater.storage.file import FileConfig, FileStorage
from headwater.testing.storage import make_format, make_keys, read_run, write_run
from headwater.types import BlockKey
from tests.search import SCALE
from tests.storage.writer import BLOCK_BYTES

FORM = make_format(block_bytes=BLOCK_BYTES)


def open_file(path: Path) -> FileStorage:
    config = FileConfig(
        path=str(path), capacity_bytes=3 << 20, slab_bytes=1 << 20, reserve_bytes=0
    )
    return FileStorage(config, FORM, SystemClock())


def start_writer(path: Path, run: str, *more: str) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.writer", str(path), run, *more],
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


@pytest.mark.slow
def test_a_writer_may_be_killed_at_any_instant(tmp_path: Path) -> None:
    """kill -9 at random moments: whatever is found afterwards is whole and right (lesson 40).

    Every block that the index of the next process knows is read and verified, none of them is
    damaged, and the directory goes on within its capacity.
    """
    chance = random.Random(7)
    found = 0
    for turn in range(30 * min(SCALE, 20)):
        writer = start_writer(tmp_path, f"turn {turn}")
        Event().wait(chance.random() * 0.04)
        stop(writer)

        storage = open_file(tmp_path)
        keys = all_keys(storage)
        assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ] * len(keys)
        assert storage.stats().reasons == {}
        storage.check()
        storage.close()
        found += len(keys)
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 3 << 20
    assert found > 0, "no writer ever wrote anything"


@pytest.mark.slow
def test_processes_find_each_others_blocks(tmp_path: Path) -> None:
    """What another process wrote after we opened is found, and never written again."""
    ours = open_file(tmp_path)
    mine, theirs = make_keys(3, run="mine"), make_keys(5, run="theirs")
    write_run(ours, mine, BLOCK_BYTES)
    writer = start_writer(tmp_path, "theirs", "5")
    assert writer.stdout is not None
    writer.stdout.readline()

    assert ours.contains(theirs, timeout_s=5) == 5
    assert read_run(ours, theirs, BLOCK_BYTES) == [BlockRead.READ] * 5
    assert write_run(ours, theirs, BLOCK_BYTES) == [BlockWrite.PRESENT] * 5
    assert ours.remove(theirs, timeout_s=5) == 0, "they are not ours to remove"
    stop(writer)
    ours.close()


@pytest.mark.slow
def test_the_slabs_of_a_dead_owner_are_taken_over(tmp_path: Path) -> None:
    """While it lives they are its own; after a kill -9 the next one may write to them."""
    theirs = make_keys(5, run="theirs")
    writer = start_writer(tmp_path, "theirs", "5")
    assert writer.stdout is not None
    writer.stdout.readline()
    reader = open_file(tmp_path)
    assert reader.stats().num_blocks == 0
    assert reader.contains(theirs, timeout_s=5) == 5
    stop(writer)

    heir = open_file(tmp_path)

    assert heir.stats().num_blocks == 5
    assert read_run(reader, theirs, BLOCK_BYTES) == [BlockRead.READ] * 5
    assert heir.remove(theirs, timeout_s=5) == 5
    assert reader.contains(theirs, timeout_s=5) == 0
    reader.close()
    heir.close()


@pytest.mark.slow
def test_a_slot_reused_under_a_reader_is_a_miss(tmp_path: Path) -> None:
    """Another process writes over what we read, all the time: never a wrong byte (lesson 44).

    `read_run` asserts the bytes of whatever counts as read. A block that went away meanwhile
    is absent, not damaged.
    """
    writer = start_writer(tmp_path, "busy")
    ours = open_file(tmp_path)
    outcomes: set[BlockRead] = set()
    while len(outcomes) < 2:
        ours.contains(make_keys(1, run="nothing"), timeout_s=5)
        keys = list(ours._index._theirs)
        outcomes.update(read_run(ours, keys, BLOCK_BYTES))
    stop(writer)

    assert outcomes == {BlockRead.READ, BlockRead.ABSENT}
    ours.close()
