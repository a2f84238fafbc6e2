"""The file backend alone: capacity, eviction order, rebuilding, damaged files."""

import os
from pathlib import Path

import pytest

from headwater.clock import SystemClock, VirtualClock
from headwater.errors import ConfigError
from headwater.storage import BlockRead, BlockWrite
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.storage.file.slab import Slab
from headwater.storage.file.table import PAGE_BYTES, Entry, Geometry, Table
from headwater.testing.storage import make_format, make_keys, read_run, write_run
from headwater.types import BlockKey
from tests.storage.conftest import FILE_BLOCK_BYTES as BLOCK_BYTES
from tests.storage.conftest import MakeFile

FORM = make_format(block_bytes=BLOCK_BYTES)


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def test_the_directory_never_exceeds_its_capacity(make_file: MakeFile, tmp_path: Path) -> None:
    """However much is written, the least recently used blocks are evicted (lesson 43)."""
    capacity = 40 * 8272
    storage = make_file(capacity_bytes=capacity)

    for number in range(30):
        outcomes = write_run(storage, make_keys(4, run=f"run {number}"), BLOCK_BYTES)
        assert outcomes == [BlockWrite.WRITTEN] * 4
        assert disk_bytes(tmp_path / "blocks") <= capacity
        storage.check()

    stats = storage.stats()
    assert stats.blocks_evicted == 120 - (stats.num_blocks or 0) > 0
    newest, oldest = make_keys(4, run="run 29"), make_keys(4, run="run 0")
    assert storage.contains([newest], timeout_s=1)[0] == 4
    assert storage.contains([oldest], timeout_s=1)[0] == 0


def test_eviction_takes_the_tail_of_a_run_first(make_file: MakeFile) -> None:
    """The rest of a run is a prefix, also if the run was written in several calls (lesson
    9)."""
    storage = make_file(capacity_bytes=8 * 8272 + PAGE_BYTES)
    keys = make_keys(6)
    write_run(storage, keys[:3], BLOCK_BYTES)
    blocks = [memoryview(bytes(BLOCK_BYTES))] * 3
    storage.write(keys[3:], blocks, parents=keys[2:5], timeout_s=1)
    capacity = storage._index.slabs[0].geometry.num_slots

    for number in range(1, 7):
        write_run(storage, make_keys(1, run=f"single {number}"), BLOCK_BYTES)
        left = storage.contains([keys], timeout_s=1)[0]
        assert left == sum(storage.contains([[key]], timeout_s=1)[0] for key in keys), "a hole"
        assert left == min(6, capacity - number)


def test_reading_keeps_a_block_from_eviction(make_file: MakeFile) -> None:
    """Order is by last use, not by age."""
    storage = make_file(capacity_bytes=8 * 8272 + PAGE_BYTES)
    num_slots = storage._geometry.num_slots
    keys = [key for n in range(num_slots) for key in make_keys(1, run=f"one {n}")]
    for key in keys:
        write_run(storage, [key], BLOCK_BYTES)

    read_run(storage, keys[:1], BLOCK_BYTES)
    write_run(storage, make_keys(1, run="new"), BLOCK_BYTES)

    assert storage.contains([keys[:1]], timeout_s=1)[0] == 1
    assert storage.contains([keys[1:2]], timeout_s=1)[0] == 0


def test_the_index_is_rebuilt_without_reading_payloads(
    make_file: MakeFile, tmp_path: Path
) -> None:
    """A restart finds every block, and its order, from the small tables alone (lesson 43)."""
    storage = make_file(capacity_bytes=8 * 8272 + PAGE_BYTES)
    keys = make_keys(5)
    write_run(storage, keys, BLOCK_BYTES)
    storage.close()
    for slab in (tmp_path / "blocks").glob("*.slab"):
        os.truncate(slab, 0)
        os.truncate(slab, storage._geometry.slab_bytes)

    again = make_file(capacity_bytes=8 * 8272 + PAGE_BYTES)

    assert again.contains([keys], timeout_s=1)[0] == 5
    write_run(again, make_keys(3, run="more"), BLOCK_BYTES)
    left = again.contains([keys], timeout_s=1)[0]
    assert 0 < left < 5
    assert read_run(again, keys[:left], BLOCK_BYTES) == [BlockRead.DAMAGED] * left


def test_the_second_write_of_a_prefix_moves_nothing(make_file: MakeFile) -> None:
    """The second write moves nothing in this process and in the next one (lesson 40)."""
    keys = make_keys(4)
    write_run(make_file(), keys, BLOCK_BYTES)
    other = make_file()

    assert write_run(other, keys, BLOCK_BYTES) == [BlockWrite.PRESENT] * 4
    assert other.stats().bytes_written == 0


def test_a_torn_table_entry_is_an_empty_slot(make_file: MakeFile, tmp_path: Path) -> None:
    """Whatever bytes a crash leaves in the table, nothing wrong is found through it."""
    storage = make_file()
    keys = make_keys(3)
    write_run(storage, keys, BLOCK_BYTES)
    storage.close()
    [table] = (tmp_path / "blocks").glob("*.table")
    with table.open("r+b") as file:
        file.seek(PAGE_BYTES + 40)
        file.write(b"torn")

    again = make_file()

    assert sum(again.contains([[key]], timeout_s=1)[0] for key in keys) == 2
    assert again.stats().num_blocks == 2
    again.check()


@pytest.mark.parametrize("suffix", [".table", ".slab"])
def test_a_damaged_file_is_left_out(make_file: MakeFile, tmp_path: Path, suffix: str) -> None:
    """Blocks of a slab that has an invalid head or is truncated are misses; other blocks are
    served."""
    storage = make_file()
    keys = make_keys(3)
    write_run(storage, keys, BLOCK_BYTES)
    storage.close()
    [path] = (tmp_path / "blocks").glob(f"*{suffix}")
    os.truncate(path, 100)

    again = make_file()

    assert again.contains([keys], timeout_s=1)[0] == 0
    assert write_run(again, keys, BLOCK_BYTES) == [BlockWrite.WRITTEN] * 3


def test_incomplete_files_of_a_killed_process_are_removed(
    make_file: MakeFile, tmp_path: Path
) -> None:
    """A slab without a table, and an unnamed table, do not take room for ever."""
    folder = tmp_path / "blocks"
    folder.mkdir()
    (folder / "half.slab").write_bytes(bytes(100))
    (folder / "half.new").write_bytes(bytes(100))

    write_run(make_file(), make_keys(1), BLOCK_BYTES)

    assert not list(folder.glob("half.*"))


def test_dead_slabs_of_another_model_give_way(make_file: MakeFile, tmp_path: Path) -> None:
    """Slabs of another model that no process owns are deleted when room is needed: the capacity
    covers all models (lessons 39, 43)."""
    capacity = 2 * (8 * 8272 + PAGE_BYTES)
    other = make_file(form=make_format("old", block_bytes=BLOCK_BYTES), capacity_bytes=capacity)
    for number in range(5):
        write_run(other, make_keys(4, run=f"{number}"), BLOCK_BYTES)
    other.close()

    ours = make_file(capacity_bytes=capacity)

    assert write_run(ours, make_keys(8), BLOCK_BYTES) == [BlockWrite.WRITTEN] * 8
    assert disk_bytes(tmp_path / "blocks") <= capacity


def test_a_slab_of_a_running_process_is_never_deleted(make_file: MakeFile) -> None:
    """A directory that others have filled refuses writes with a reason."""
    capacity = 8 * 8272 + PAGE_BYTES
    other = make_file(form=make_format("new", block_bytes=BLOCK_BYTES), capacity_bytes=capacity)
    write_run(other, make_keys(2), BLOCK_BYTES)

    ours = make_file(capacity_bytes=capacity)

    assert write_run(ours, make_keys(2), BLOCK_BYTES) == [BlockWrite.REFUSED] * 2
    assert ours.stats().reasons == {"no_room": 2}
    assert other.contains([make_keys(2)], timeout_s=1)[0] == 2


def test_space_that_becomes_free_is_used(make_file: MakeFile) -> None:
    """A full directory is checked again after a while, not at every write."""
    clock, capacity = VirtualClock(), 8 * 8272 + PAGE_BYTES
    other = make_file(form=make_format("new", block_bytes=BLOCK_BYTES), capacity_bytes=capacity)
    write_run(other, make_keys(2), BLOCK_BYTES)
    ours = make_file(capacity_bytes=capacity, clock=clock)
    write_run(ours, make_keys(1), BLOCK_BYTES)
    other.close()

    assert write_run(ours, make_keys(1), BLOCK_BYTES) == [BlockWrite.REFUSED]
    clock.advance(60.0)
    assert write_run(ours, make_keys(1), BLOCK_BYTES) == [BlockWrite.WRITTEN]


def test_a_slot_is_not_reused_while_it_is_read(make_file: MakeFile) -> None:
    """Eviction skips a leased block; the slot of a removed block is freed when the read
    ends."""
    storage = make_file(capacity_bytes=8 * 8272 + PAGE_BYTES)
    index, num_slots = storage._index, storage._geometry.num_slots
    keys = make_keys(num_slots)
    write_run(storage, keys, BLOCK_BYTES)
    place = index.lease(keys[-1])
    assert place is not None

    write_run(storage, make_keys(1, run="new"), BLOCK_BYTES)
    assert storage.contains([keys[-1:]], timeout_s=1)[0] == 1
    assert storage.contains([keys[-2:-1]], timeout_s=1)[0] == 0

    assert storage.remove(keys[-1:], timeout_s=1) == 1
    assert not index.has_free()
    index.release(place)
    assert index.has_free()
    storage.check()


def test_blocks_are_whole_slots_of_pages() -> None:
    """Header and payload each begin at a page, as direct I/O needs."""
    for block_bytes, slot_bytes in ((1, 8192), (4096, 8192), (4097, 12_288)):
        geometry = Geometry(make_format(block_bytes=block_bytes), 3)
        assert geometry.slot_bytes == slot_bytes
        assert geometry.slab_bytes == 3 * slot_bytes


def test_a_table_tells_readers_what_changed(tmp_path: Path) -> None:
    """Each change is reported once, and nothing without a change."""
    geometry = Geometry(FORM, 4)
    slab = Slab.create(tmp_path / "one.table", geometry, direct=True)
    reader = Table(tmp_path / "one.table", writable=False)
    [key, parent] = make_keys(2)
    entry = Entry(2, key, BlockKey(parent), 7)

    assert reader.changed() == []
    slab.table.put(entry)
    assert reader.changed() == [(2, entry)]
    assert reader.changed() == []
    slab.table.clear(2)
    assert reader.changed() == [(2, None)]
    assert not reader.own()


def test_capacity_for_less_than_a_block_is_refused(make_file: MakeFile) -> None:
    """The message says how much one block takes."""
    with pytest.raises(ConfigError, match="a slab of one block takes 12368"):
        make_file(capacity_bytes=10_000)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    """The path is refused at start, and the message names it (lesson 61)."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        FileStorage(FileConfig(path=str(tmp_path / "file" / "x")), FORM, SystemClock())
