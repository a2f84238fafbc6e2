"""Damaged bytes below a backend are a miss with a reason, on every backend (lesson 44)."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.storage import BlockRead, BlockWrite, StorageBackend
from headwater.storage.memory import MemoryStorage
from headwater.storage.mooncake.backend import MooncakeStorage
from headwater.testing.faults import BYTE_FAULTS, Fault, FaultyStorage, Medium
from headwater.testing.media import FileMedium, MemoryMedium, MooncakeMedium, RedisMedium
from headwater.testing.storage import make_format, make_keys, read_run, write_run
from tests.storage.conftest import MakeBackend, RedisServer

BLOCK_BYTES = 8192
REASONS = {
    Fault.TRUNCATED: {"bad_length", "bad_checksum", "truncated"},
    Fault.FLIPPED_BIT: {"bad_checksum"},
    Fault.SWAPPED: {"other_key"},
    Fault.OTHER_MODEL: {"other_model"},
}


@pytest.fixture
def medium_of(
    request: pytest.FixtureRequest, backend_name: str, tmp_path: Path
) -> Iterator[Callable[[StorageBackend], Medium]]:
    """The medium below a backend of `make_backend`."""
    links = []

    def find(backend: StorageBackend) -> Medium:
        if isinstance(backend, MemoryStorage):
            return MemoryMedium(backend)
        if isinstance(backend, MooncakeStorage):
            return MooncakeMedium(backend._store, f"{tmp_path}:")
        if backend_name == "file":
            return FileMedium(tmp_path / "blocks")
        server: RedisServer = request.getfixturevalue("redis_server")
        links.append(RedisMedium(server.url, f"{tmp_path}:"))
        return links[-1]

    yield find
    for link in links:
        link.close()


def test_damage_is_a_miss_with_a_reason_and_can_be_written_again(
    make_backend: MakeBackend, medium_of: Callable[[StorageBackend], Medium]
) -> None:
    """Truncated, flipped, swapped and foreign blocks: DAMAGED once, ABSENT afterwards, then
    good. Other blocks are served as usual, and no byte of a damaged block counts as read."""
    backend = make_backend(make_format(block_bytes=BLOCK_BYTES))
    for fault in BYTE_FAULTS:
        keys = make_keys(4, run=fault.name)
        write_run(backend, keys, BLOCK_BYTES)
        double = FaultyStorage(backend, {"read": [fault]}, medium_of(backend))
        num_bad = 2 if fault is Fault.SWAPPED else 1
        before = backend.stats().reasons

        outcomes = read_run(double, keys, BLOCK_BYTES)

        good = [BlockRead.READ] * (4 - num_bad)
        assert outcomes == [BlockRead.DAMAGED] * num_bad + good, fault
        after = backend.stats().reasons
        counted = {reason for reason in after if after[reason] > before.get(reason, 0)}
        assert counted, fault
        assert counted <= REASONS[fault], fault
        assert read_run(double, keys, BLOCK_BYTES) == [BlockRead.ABSENT] * num_bad + good
        rewritten = write_run(double, keys, BLOCK_BYTES)
        assert rewritten[:num_bad] == [BlockWrite.WRITTEN] * num_bad
        assert read_run(double, keys, BLOCK_BYTES) == [BlockRead.READ] * 4
