"""The contract of a storage backend, as a function that you can run on your own backend.

    check_storage_backend(lambda form: MyStorage(..., form))

It does not need pytest. Every rule is an assertion with a message; see `docs/storage.md`.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headwater.errors import StorageError
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend
from headwater.storage.codec import BlockFormat
from headwater.types import BlockKey

MakeStorage = Callable[[BlockFormat], StorageBackend]
"""Opens a backend for blocks of one format. It is called a second time on a medium that
persists; that call may be for another model."""

_TIMEOUT_S = 30.0


def make_format(name: str = "a model", *, block_bytes: int = 8192) -> BlockFormat:
    """A block format whose fingerprint depends on `name`."""
    fingerprint = hashlib.sha256(name.encode()).digest()
    return BlockFormat(fingerprint=fingerprint, block_bytes=block_bytes)


def make_keys(count: int, *, run: str = "run") -> list[BlockKey]:
    """The keys of a run of blocks; another `run` has no key in common."""
    return [BlockKey(hashlib.sha256(f"{run}/{n}".encode()).digest()) for n in range(count)]


def make_parents(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """The key before each key of a run."""
    return [BlockKey(bytes(32)), *keys[:-1]]


def make_block(key: BlockKey, block_bytes: int) -> memoryview:
    """Bytes that belong only to this key."""
    return memoryview(hashlib.shake_128(key).digest(block_bytes))


def check_storage_backend(
    make: MakeStorage, *, block_bytes: int = 8192, durable: bool = False
) -> None:
    """Check all guarantees of `StorageBackend`.

    `make` opens backends on a medium that is empty, or has none of `make_keys`. `durable` means
    that blocks outlive the backend object that wrote them.
    """
    backend = make(make_format(block_bytes=block_bytes))
    try:
        for check in (
            _check_empty,
            _check_round_trip,
            _check_leading_run,
            _check_never_rewritten,
            _check_remove,
            _check_any_buffer,
            _check_wrong_buffer,
            _check_threads,
        ):
            check(backend, block_bytes)
        _check_other_model(make, backend, block_bytes)
    finally:
        backend.close()
        backend.close()
    if durable:
        _check_durable(make, block_bytes)


def write_run(
    backend: StorageBackend, keys: Sequence[BlockKey], block_bytes: int
) -> list[BlockWrite]:
    """Write the bytes of `make_block` for each key."""
    blocks = [make_block(key, block_bytes) for key in keys]
    return backend.write(keys, blocks, parents=make_parents(keys), timeout_s=_TIMEOUT_S)


def read_run(
    backend: StorageBackend, keys: Sequence[BlockKey], block_bytes: int
) -> list[BlockRead]:
    """Read each key, and check that every block reported as read has the right bytes."""
    views = [memoryview(bytearray(block_bytes)) for _ in keys]
    outcomes = backend.read(keys, views, timeout_s=_TIMEOUT_S)
    assert len(outcomes) == len(keys), "read() must return one outcome per block"
    for key, view, outcome in zip(keys, views, outcomes, strict=True):
        if outcome is BlockRead.READ:
            assert view == make_block(key, block_bytes), "a block with wrong bytes was served"
    return outcomes


def _check_empty(backend: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(3, run="empty")

    assert backend.contains([[]], timeout_s=_TIMEOUT_S)[0] == 0
    assert backend.read([], [], timeout_s=_TIMEOUT_S) == []
    assert backend.write([], [], parents=[], timeout_s=_TIMEOUT_S) == []
    assert backend.remove([], timeout_s=_TIMEOUT_S) == 0
    assert backend.contains([keys], timeout_s=_TIMEOUT_S)[0] == 0, (
        "contains() finds a block that was never written"
    )
    assert read_run(backend, keys, block_bytes) == [BlockRead.ABSENT] * 3
    assert backend.remove(keys, timeout_s=_TIMEOUT_S) == 0, (
        "remove() counts a block that was never written"
    )


def _check_round_trip(backend: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(5, run="round trip")
    before = backend.stats()

    assert write_run(backend, keys, block_bytes) == [BlockWrite.WRITTEN] * 5
    assert backend.contains([keys], timeout_s=_TIMEOUT_S)[0] == 5, (
        "a written block is not found"
    )
    assert read_run(backend, keys, block_bytes) == [BlockRead.READ] * 5
    after = backend.stats()
    assert after.blocks_written - before.blocks_written == 5, "stats() does not count writes"
    assert after.blocks_read - before.blocks_read == 5, "stats() does not count reads"
    assert after.bytes_read - before.bytes_read == 5 * block_bytes


def _check_leading_run(backend: StorageBackend, block_bytes: int) -> None:
    first, hole, last = make_keys(3, run="leading")

    write_run(backend, [first, last], block_bytes)

    assert backend.contains([[first, hole, last]], timeout_s=_TIMEOUT_S)[0] == 1, (
        "contains() counts blocks after a missing one"
    )
    runs = [[hole, first], [first], [], [first, hole], [last, first]]
    assert backend.contains(runs, timeout_s=_TIMEOUT_S) == [0, 1, 0, 1, 2], (
        "contains() does not count each run separately"
    )
    outcomes = read_run(backend, [first, hole, last], block_bytes)
    assert outcomes == [BlockRead.READ, BlockRead.ABSENT, BlockRead.READ]


def _check_never_rewritten(backend: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(2, run="rewritten")

    write_run(backend, keys[:1], block_bytes)
    before = backend.stats().bytes_written
    again = backend.write(
        keys[:1],
        [memoryview(bytes(block_bytes))],
        parents=make_parents(keys[:1]),
        timeout_s=_TIMEOUT_S,
    )
    assert again == [BlockWrite.PRESENT], "a key was written twice"
    assert backend.stats().bytes_written == before, "bytes of a present block were moved"
    assert read_run(backend, keys[:1], block_bytes) == [BlockRead.READ]

    twice = write_run(backend, [keys[1], keys[1]], block_bytes)
    assert sorted(outcome.value for outcome in twice) == ["present", "written"]


def _check_remove(backend: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(4, run="remove")

    write_run(backend, keys, block_bytes)

    assert backend.remove([keys[1], *make_keys(1, run="absent")], timeout_s=_TIMEOUT_S) == 1
    assert backend.contains([keys], timeout_s=_TIMEOUT_S)[0] == 1, "a removed block is found"
    assert read_run(backend, keys, block_bytes)[1] is BlockRead.ABSENT
    assert write_run(backend, [keys[1]], block_bytes) == [BlockWrite.WRITTEN]
    assert read_run(backend, keys, block_bytes) == [BlockRead.READ] * 4
    assert backend.remove(None, timeout_s=_TIMEOUT_S) >= 4, (
        "remove(None) does not count every block"
    )
    assert backend.contains([keys], timeout_s=_TIMEOUT_S) == [0], "a removed block is found"
    assert backend.remove(None, timeout_s=_TIMEOUT_S) == 0
    assert write_run(backend, keys, block_bytes) == [BlockWrite.WRITTEN] * 4


def _check_any_buffer(backend: StorageBackend, block_bytes: int) -> None:
    [key] = make_keys(1, run="buffer")
    room = memoryview(bytearray(block_bytes + 3))
    odd = room[3:]
    odd[:] = make_block(key, block_bytes)

    wrote = backend.write([key], [odd], parents=make_parents([key]), timeout_s=_TIMEOUT_S)
    odd[:] = bytes(block_bytes)
    got = backend.read([key], [odd], timeout_s=_TIMEOUT_S)

    assert (wrote, got) == ([BlockWrite.WRITTEN], [BlockRead.READ])
    assert odd == make_block(key, block_bytes), "a buffer at an odd address is not filled"
    assert bytes(room[:3]) == bytes(3), "bytes outside the buffer were changed"


def _check_wrong_buffer(backend: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(1, run="wrong buffer")
    wrong = memoryview(bytearray(block_bytes + 1))
    calls: list[Callable[[], object]] = [
        lambda: backend.read(keys, [wrong], timeout_s=_TIMEOUT_S),
        lambda: backend.write(keys, [wrong], parents=make_parents(keys), timeout_s=_TIMEOUT_S),
    ]
    for call in calls:
        try:
            call()
        except StorageError:
            continue
        raise AssertionError("a buffer of the wrong size was accepted")


def _check_threads(backend: StorageBackend, block_bytes: int) -> None:
    runs = [make_keys(4, run=f"thread {number % 3}") for number in range(12)]

    def turn(keys: list[BlockKey]) -> None:
        write_run(backend, keys, block_bytes)
        read_run(backend, keys, block_bytes)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(turn, runs))
    for keys in runs[:3]:
        assert read_run(backend, keys, block_bytes) == [BlockRead.READ] * 4


def _check_other_model(make: MakeStorage, ours: StorageBackend, block_bytes: int) -> None:
    keys = make_keys(2, run="other model")
    write_run(ours, keys, block_bytes)

    theirs = make(make_format("another model", block_bytes=block_bytes))
    try:
        outcomes = read_run(theirs, keys, block_bytes)
        assert BlockRead.READ not in outcomes, "the block of another model was returned"
    finally:
        theirs.close()


def _check_durable(make: MakeStorage, block_bytes: int) -> None:
    form, keys = make_format(block_bytes=block_bytes), make_keys(3, run="durable")
    before = make(form)
    write_run(before, keys, block_bytes)
    before.close()

    after = make(form)
    try:
        assert after.contains([keys], timeout_s=_TIMEOUT_S)[0] == 3, (
            "blocks are lost when the backend is closed"
        )
        assert read_run(after, keys, block_bytes) == [BlockRead.READ] * 3
    finally:
        after.close()
