"""The published contract, for every backend and every wrapper."""

import pytest

from headwater.clock import VirtualClock
from headwater.storage import BlockFormat, BreakerConfig, GuardedStorage
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.faults import FaultyStorage
from headwater.testing.storage import check_storage_backend
from tests.storage.conftest import MakeBackend


def make_memory(form: BlockFormat) -> MemoryStorage:
    return MemoryStorage(MemoryConfig(), form)


def test_every_backend_keeps_the_contract(make_backend: MakeBackend, backend_name: str) -> None:
    """All four backends keep the contract, on real servers (lessons 39, 40, 42, 44)."""
    check_storage_backend(make_backend, durable=backend_name in ("file", "redis"))


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 100_000])
def test_blocks_of_any_size_are_kept(block_bytes: int) -> None:
    """A block need not consist of whole pages."""
    check_storage_backend(make_memory, block_bytes=block_bytes)


@pytest.mark.parametrize("backend_name", ["file", "redis"])
@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 20])
@pytest.mark.slow
def test_media_keep_blocks_of_any_size(make_backend: MakeBackend, block_bytes: int) -> None:
    """Blocks that are not whole pages pass through a staging buffer on disk."""
    check_storage_backend(make_backend, block_bytes=block_bytes)


@pytest.mark.parametrize("backend_name", ["file"])
def test_buffered_files_keep_the_contract(make_backend: MakeBackend) -> None:
    """Without direct I/O everything else is the same."""
    check_storage_backend(lambda form: make_backend(form, direct=False), durable=True)


def test_a_guarded_backend_keeps_the_contract() -> None:
    """A closed breaker changes nothing."""
    check_storage_backend(
        lambda form: GuardedStorage(make_memory(form), BreakerConfig(), VirtualClock())
    )


def test_a_double_without_faults_keeps_the_contract() -> None:
    """A FaultyStorage with an empty script is the backend itself."""
    check_storage_backend(lambda form: FaultyStorage(make_memory(form), {}))
