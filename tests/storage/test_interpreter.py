"""Storage threads release the interpreter lock while they work: the loop never waits for one.

Lesson 13: threads that were busy under one interpreter lock cost a tenth of the throughput.
"""

import os

import pytest

from headwater.storage.calls import copy_bytes
from headwater.storage.codec import checksum
from headwater.testing.storage import make_format, make_keys, make_parents
from tests.interpreter import holds_interpreter
from tests.storage.conftest import MakeBackend

BLOCK_BYTES = 64 << 20
TIMEOUT_S = 30.0


def make_buffer() -> memoryview:
    return memoryview(bytearray(os.urandom(1 << 20) * (BLOCK_BYTES >> 20)))


def test_code_that_holds_the_gil_is_detected() -> None:
    """As a control, a slice assignment of the same bytes blocks other threads."""
    source, target = make_buffer(), make_buffer()

    def assign() -> None:
        target[:] = source

    assert holds_interpreter(assign)
    assert not holds_interpreter(lambda: copy_bytes(target, source))
    assert target == source


def test_a_checksum_releases_the_gil() -> None:
    """Verification is most of the work of a fast medium."""
    block = make_buffer()

    assert not holds_interpreter(lambda: checksum(block))


@pytest.mark.slow
def test_reading_and_writing_release_the_gil(
    make_backend: MakeBackend, backend_name: str
) -> None:
    """The interpreter lock is free during the checksum, copies, system calls and sockets of one
    large block, on every backend."""
    room = {"segment_bytes": 4 * BLOCK_BYTES} if backend_name == "mooncake" else {}
    backend = make_backend(make_format(block_bytes=BLOCK_BYTES), **room)
    [key], block = make_keys(1), make_buffer()
    parents = make_parents([key])

    def write() -> None:
        backend.remove([key], timeout_s=TIMEOUT_S)
        backend.write([key], [block], parents=parents, timeout_s=TIMEOUT_S)

    def read() -> None:
        backend.read([key], [block], timeout_s=TIMEOUT_S)

    assert not holds_interpreter(write)
    assert not holds_interpreter(read)
    assert backend.stats().reasons == {}
    assert backend.stats().blocks_read > 0
