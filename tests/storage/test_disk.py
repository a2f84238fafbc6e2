"""The file backend on a disk with problems: no room, no answer, no direct I/O, a held lock."""

import errno
import fcntl
import os
import resource
import signal
from pathlib import Path
from threading import Event

import pytest

from headwater.errors import StorageError, StorageTimeout
from headwater.storage import BlockRead, BlockWrite
from headwater.storage.file.table import PAGE_BYTES
from headwater.testing.storage import (
    make_block,
    make_format,
    make_keys,
    make_parents,
    read_run,
    write_run,
)
from tests.storage.conftest import FILE_BLOCK_BYTES as BLOCK_BYTES
from tests.storage.conftest import MakeFile


def test_disk_space_is_allocated_by_one_process_at_a_time(
    make_file: MakeFile, tmp_path: Path
) -> None:
    """A process needs the directory's lock to create a slab, so two processes cannot both take
    the last free space. A process that waits for the lock gets a timeout, and continues when it
    is free."""
    storage, keys = make_file(), make_keys(1)
    block = memoryview(make_block(keys[0], BLOCK_BYTES))
    with (tmp_path / "blocks" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StorageTimeout) as caught:
            storage.write(keys, [block], parents=make_parents(keys), timeout_s=0.5)

    assert caught.value.quiet is not None
    assert caught.value.quiet.wait(10.0)
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ]


def test_a_full_disk_is_a_refused_write(make_file: MakeFile) -> None:
    """The write raises no exception and is counted, and earlier blocks are still served (lesson
    43). The limit on file sizes simulates a full disk."""
    storage = make_file(slab_bytes=4 * 8272 + PAGE_BYTES)
    num_slots = storage._geometry.num_slots
    keys = make_keys(num_slots)
    write_run(storage, keys, BLOCK_BYTES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        fresh = make_file(path=str(storage._directory.path) + "-2")
        assert (
            write_run(fresh, make_keys(2, run="late"), BLOCK_BYTES) == [BlockWrite.REFUSED] * 2
        )
        late = write_run(storage, make_keys(1, run="late"), BLOCK_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert late == [BlockWrite.REFUSED]
    assert storage.stats().reasons == {"disk_full": 1}
    assert fresh.stats().reasons == {"disk_full": 2}
    assert storage.contains([keys], timeout_s=1)[0] >= num_slots - 1
    storage.check()


def test_the_disk_keeps_its_reserve(
    make_file: MakeFile, caplog: pytest.LogCaptureFixture
) -> None:
    """The reserve stays free, whatever the capacity is. The reason names the disk, because the
    directory itself has room."""
    storage = make_file(reserve_bytes=1 << 60)

    assert write_run(storage, make_keys(2), BLOCK_BYTES) == [BlockWrite.REFUSED] * 2
    assert storage.stats().reasons == {"disk_full": 2}
    lines = [
        line for line in caplog.messages if "disk of the storage directory is full" in line
    ]
    assert len(lines) == 1
    assert f"reserve_bytes={1 << 60}" in lines[0]


def test_a_failed_write_can_never_be_found(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short writes and disk errors leave an empty slot, here and after a restart (lesson 40)."""
    storage = make_file()
    keys = make_keys(2)
    write_run(storage, keys[:1], BLOCK_BYTES)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, parts, at: PAGE_BYTES)
        assert write_run(storage, keys[1:], BLOCK_BYTES) == [BlockWrite.REFUSED]

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(StorageError, match="the disk is broken"):
            write_run(storage, keys[1:], BLOCK_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match="cannot read"):
            read_run(storage, keys[:1], BLOCK_BYTES)

    assert storage.stats().reasons == {"disk_full": 1, "io_error": 1}
    storage.check()
    storage.close()
    assert make_file().contains([keys[1:]], timeout_s=1)[0] == 0


def test_a_read_that_hangs_is_left_behind(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of the read gets a timeout, and later an event when the buffer is not used any
    more (lesson 50)."""
    storage = make_file()
    [key] = make_keys(1)
    write_run(storage, [key], BLOCK_BYTES)
    hung, real = Event(), os.preadv

    def slow(fd: int, parts: list[memoryview], at: int) -> int:
        hung.wait(30.0)
        return real(fd, parts, at)

    monkeypatch.setattr(os, "preadv", slow)
    into = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(StorageTimeout) as caught:
        storage.read([key], [into], timeout_s=0.02)

    quiet = caught.value.quiet
    assert quiet is not None
    assert not quiet.is_set()
    hung.set()
    assert quiet.wait(10.0)
    storage.check()


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_where_direct_io_is_refused_files_are_buffered(
    make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    """Some file systems refuse the flag, others accept it and refuse the first read. On both,
    blocks are stored and found as usual, including those that are not whole pages."""
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def open_file(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, "no direct I/O here")
        fd = real_open(path, flags & ~os.O_DIRECT, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def preadv(fd: int, parts: list[memoryview], at: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real_preadv(fd, parts, at)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "preadv", preadv)
    for number, block_bytes in enumerate((BLOCK_BYTES, 5000)):
        storage = make_file(form=make_format(f"{number}", block_bytes=block_bytes))
        keys = make_keys(3)
        assert write_run(storage, keys, block_bytes) == [BlockWrite.WRITTEN] * 3
        assert read_run(storage, keys, block_bytes) == [BlockRead.READ] * 3
        assert [slab.direct for slab in storage._index.slabs] == [False]
