"""The far end of a link in a process of its own, and the pools of both ends.

gpu_far.py send ADDRESS LEASES     pushes all blocks to lease 1, 2 … and prints each outcome
gpu_far.py receive                 opens lease 1 to 4 and prints its address
"""

import sys
from threading import Event
from typing import Any

import torch

from headwater.clock import SystemClock
from headwater.device.gpu.peer_blocks import CudaBlocks
from headwater.device.kv import KVPool
from headwater.device.open import open_copier
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.protocol.push import BlockPiece, Push
from headwater.testing.links import EventLog
from tests.device.pool_shape import shape_of_2_mib_blocks

CONFIG = LinkConfig(token=b"a token of tests", connect_timeout_s=10.0)
NUM_BLOCKS = 48


def make_pool(seed: int | None = None, *, shared: bool = True) -> KVPool:
    """A pool that peers can map; random bytes with a seed, else zeros."""
    model: Any = shape_of_2_mib_blocks()
    pool = KVPool(model, num_blocks=NUM_BLOCKS, block_tokens=64, shared=shared)
    if seed is not None:
        pool.blocks.copy_(random_blocks(seed))
    torch.cuda.synchronize()
    return pool


def links_of(pool: KVPool, log: EventLog) -> StagedLinks:
    """All links of an instance with this pool."""
    clock = SystemClock()
    return StagedLinks(
        CONFIG,
        pool.block_bytes,
        lambda slab: open_copier(pool, slab, clock, for_links=True),
        log,
        clock,
        device=CudaBlocks(pool),
    )


def random_blocks(seed: int) -> torch.Tensor:
    """The bytes of a pool with this seed, in main memory."""
    made = torch.Generator().manual_seed(seed)
    shape = (NUM_BLOCKS, 2 << 20)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)


def push_all(sender: Any, job: int, lease: int, block_bytes: int) -> None:
    """Push every block to one lease."""
    pieces = tuple(BlockPiece(at, at, block_bytes) for at in range(NUM_BLOCKS))
    deadline_s = SystemClock().now() + 60.0
    sender.push(Push(job=job, lease=lease, pieces=pieces, deadline_s=deadline_s))


def say(what: object) -> None:
    """Print one line for the test."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def send(address: str, num_leases: int) -> None:
    """Push again and again, until done or killed."""
    log, pool = EventLog(), make_pool(seed=3)
    sender = links_of(pool, log).connect(address)
    for lease in range(1, num_leases + 1):
        push_all(sender, lease, lease, pool.block_bytes)
        say(log.outcome(lease))
    sender.close()


def receive() -> None:
    """Accept everything, until killed."""
    receiver = Links(CONFIG, CudaBlocks(make_pool()), EventLog()).listen("cuda")
    for lease in range(1, 5):
        receiver.open(lease, range(NUM_BLOCKS))
    say(receiver.address)
    Event().wait(60.0)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], int(sys.argv[3]))
