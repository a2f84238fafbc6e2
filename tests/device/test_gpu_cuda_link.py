"""Links that map memory of the sender, on a GPU: two processes on one device, exact bytes, deaths.

With `cuda` it is the sender's pool, with `shm` its staging buffers in main memory.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.disagg.links.registry import Links
from headwater.disagg.protocol.push import PushDone, PushFailed
from headwater.errors import DeviceError
from headwater.testing.links import EventLog
from headwater.transfer.shared import SharedPages, map_shared
from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.peer_blocks import CudaBlocks  # noqa: E402
from tests.device import gpu_far  # noqa: E402
from tests.device.gpu_far import (  # noqa: E402
    CONFIG,
    NUM_BLOCKS,
    links_of,
    make_pool,
    random_blocks,
)

__all__ = ["pytestmark"]

ROOT = Path(__file__).parent.parent.parent

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts far ends, and ends them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.device.gpu_far", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        with process:  # waits, and closes its output
            pass


def line_of(process: "subprocess.Popen[str]", begins: str) -> str:
    """The next line with this prefix."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return line.strip()
    raise AssertionError(f"the far end said nothing that begins with {begins!r}")


@pytest.mark.parametrize("link", ["cuda", "shm", "tcp"])
def test_blocks_arrive_from_another_process_byte_for_byte(start: Start, link: str) -> None:
    """Blocks arrive in the slots of the lease, in any order of slots."""
    pool, log = make_pool(), EventLog()
    receiver = links_of(pool, log).listen(link)
    slots = [(7 * at + 5) % NUM_BLOCKS for at in range(NUM_BLOCKS)]
    receiver.open(1, slots)
    line_of(start("send", receiver.address, "1"), "PushDone")
    receiver.fence(1)

    assert log.closed(1).num_bytes == NUM_BLOCKS * pool.block_bytes
    assert torch.equal(pool.blocks[slots].cpu(), random_blocks(3))
    receiver.close()


@pytest.mark.parametrize("link", ["cuda", "shm"])
def test_a_sender_killed_during_copies_leaves_right_blocks_and_frees_its_memory(
    start: Start, link: str
) -> None:
    """After kill -9 the sender's memory stays mapped until the connection is closed (lessons
    53, 54)."""
    pool, log = make_pool(), EventLog()
    receiver = links_of(pool, log).listen(link)
    num_leases = 2000
    for lease in range(1, num_leases + 1):
        receiver.open(lease, range(NUM_BLOCKS))
    sender = start("send", receiver.address, str(num_leases))
    line_of(sender, "PushDone")
    sender.kill()
    sender.wait()
    for lease in range(1, num_leases + 1):
        receiver.fence(lease)
    closings = [log.closed(lease) for lease in range(1, num_leases + 1)]

    assert closings[0].num_bytes == NUM_BLOCKS * pool.block_bytes
    for closed in closings:
        assert closed.num_bytes == len(closed.blocks) * pool.block_bytes
    assert torch.equal(pool.blocks.cpu(), random_blocks(3))
    receiver.open(num_leases + 1, range(NUM_BLOCKS))
    pool.blocks.zero_()
    again = make_pool(seed=4)
    other = links_of(again, log).connect(receiver.address)
    gpu_far.push_all(other, 1, num_leases + 1, pool.block_bytes)
    assert log.outcome(1) == PushDone(1, NUM_BLOCKS * pool.block_bytes)
    assert torch.equal(pool.blocks.cpu(), random_blocks(4))
    other.close()
    receiver.close()


def test_a_receiver_that_is_killed_fails_every_push(start: Start) -> None:
    """The sender's memory is as usable as before (lesson 53)."""
    far = start("receive")
    address = line_of(far, "cuda")
    pool, log = make_pool(seed=5), EventLog()
    sender = Links(CONFIG, CudaBlocks(pool), log).connect(address)
    gpu_far.push_all(sender, 1, 1, pool.block_bytes)
    assert isinstance(log.outcome(1), PushDone)
    far.kill()
    far.wait()
    gpu_far.push_all(sender, 2, 2, pool.block_bytes)

    assert isinstance(log.outcome(2), PushFailed)
    assert torch.equal(pool.blocks.cpu(), random_blocks(5))
    sender.close()


def test_closing_a_connection_unmaps_the_peers_memory() -> None:
    """The device memory is free again when both the sender's pool and the mapping are gone."""
    torch.cuda.empty_cache()
    target = make_pool()
    before = torch.cuda.mem_get_info()[0]
    source: Any = make_pool(seed=1)
    peer = CudaBlocks(target).map_peer(source.pages.file, source.pages.num_bytes)
    size = source.pages.num_bytes
    copy = peer.start_copy([3, 4, 9], [1, 2, 5], [2 << 20, 2 << 20, 100])
    copy.wait()
    assert torch.equal(target.blocks[1:3], source.blocks[3:5])
    assert torch.equal(target.blocks[5, :100], source.blocks[9, :100])
    assert not target.blocks[5, 100:].any()
    del source
    assert before - torch.cuda.mem_get_info()[0] >= size // 2, "it is still mapped"
    peer.close()

    assert before - torch.cuda.mem_get_info()[0] < size // 2


def test_a_device_reads_main_memory_that_it_cannot_write() -> None:
    """The device copies blocks of a peer on this machine without a buffer of the receiver."""
    pool, pages = make_pool(), SharedPages(4 * (2 << 20))
    blocks = CudaBlocks(pool)
    assert blocks.can_map_host()
    pages.memory[2 << 20 : 4 << 20] = random_blocks(6)[0].numpy().data
    peer = blocks.map_host(map_shared(pages.file, 4 * (2 << 20)))
    peer.start_copy([1], [7], [2 << 20]).wait()
    peer.close()

    assert torch.equal(pool.blocks[7].cpu(), random_blocks(6)[0])
    assert not pool.blocks[6].any()


def test_memory_of_the_same_device_is_near() -> None:
    """Memory of the receiver's own device is reported as near; frames of such memory are
    larger."""
    pool = make_pool(seed=1)
    pages: Any = pool.pages
    peer = CudaBlocks(make_pool()).map_peer(pages.file, pages.num_bytes)
    is_near = peer.is_near
    peer.close()

    assert is_near


@pytest.mark.parametrize("kind", ["a pipe", "too large"])
def test_memory_that_cannot_be_mapped_is_refused(kind: str) -> None:
    """The device continues to work afterwards (lesson 66)."""
    pool = make_pool(seed=2)
    reading, writing = os.pipe()
    pages: Any = pool.pages
    file, size = (reading, 2 << 20) if kind == "a pipe" else (pages.file, 4 * pages.num_bytes)
    with pytest.raises(DeviceError):
        CudaBlocks(pool).map_peer(file, size)
    os.close(reading)
    os.close(writing)

    assert torch.equal(pool.blocks.cpu(), random_blocks(2))


def test_a_private_pool_offers_nothing() -> None:
    """Peers can map only a pool that was made `shared`."""
    assert CudaBlocks(make_pool(shared=False)).file is None
