"""The `shm` link where the receiver's device reads main memory of the sender by itself."""

import pytest

from headwater.disagg.links.staging.receiver import StagedReceiver
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import DeviceError
from headwater.testing.device_blocks import PeerArray
from headwater.testing.link_contract import CHECKS, open_harness
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.staging_doubles import ArrayCopier
from tests.disagg.wire import CONFIG

BLOCK_BYTES = 4096


class ReadingBlocks:
    """Blocks of a device double that reads main memory of peers, unless `reads` is False."""

    file = None

    def __init__(self, array: BlockArray) -> None:
        self.block_bytes = array.block_bytes
        self.num_bytes = array.num_bytes
        self._array = array
        self.reads = True
        self.num_mapped = 0

    def view(self, slot):
        return memoryview(b"")

    def map_peer(self, file, num_bytes):
        raise DeviceError("the device double has no device memory")

    def can_map_host(self):
        return self.reads

    def map_host(self, memory):
        if self._array.device.refuses:
            raise DeviceError("the device double pins nothing")
        self.num_mapped += 1
        return PeerArray(memory, self._array.rows, self._array.device)


class MakeReading:
    """Staged links of instances whose devices read main memory of peers."""

    def __init__(self) -> None:
        self.blocks: list[ReadingBlocks] = []

    def __call__(self, memory, deliver):
        self.blocks.append(ReadingBlocks(memory))
        return StagedLinks(
            CONFIG,
            memory.block_bytes,
            lambda slab: ArrayCopier(memory, slab),
            deliver,
            device=self.blocks[-1],
        )


@pytest.fixture
def made():
    return MakeReading()


@pytest.fixture
def harness(made):
    with open_harness(made, "shm", BLOCK_BYTES) as harness:
        yield harness
        harness.target.device.opened.set()


@pytest.mark.parametrize("block_bytes", [4096 * 3 + 40, 3 << 20], ids=("small", "large"))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(made, check, block_bytes):
    """The link keeps the order of events, one outcome per push, and fences (lesson 50)."""
    with open_harness(made, "shm", block_bytes) as harness:
        check(harness)


def test_the_device_copies_and_no_buffer_of_the_receiver(harness, made):
    """The sender's buffers are mapped once for each connection."""
    harness.receiver.open(1, [3, 4])
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    sender.push(harness.push(2, 1, [1]))

    assert harness.done(1) == harness.done(2) == BLOCK_BYTES
    assert made.blocks[0].num_mapped == 1
    assert not isinstance(harness.receiver, StagedReceiver)


def test_a_lease_is_closed_when_the_device_has_ended_its_copy(harness):
    """A fence waits for a copy that the device has begun (lesson 50)."""
    harness.receiver.open(1, [3])
    harness.target.device.opened.clear()
    harness.sender().push(harness.push(1, 1, [0]))
    assert harness.target.device.begun.wait(10.0)
    harness.receiver.fence(1)

    assert harness.log.closings(1) == []
    harness.target.device.opened.set()
    assert harness.log.closed(1).blocks == frozenset({0})


def test_a_peer_whose_memory_cannot_be_read_fails_its_pushes(harness):
    """No push waits, and the next connection is tried again (lesson 53)."""
    harness.receiver.open(1, [3])
    harness.target.device.refuses = True
    sender = harness.sender()
    sender.push(harness.push(1, 1, [0]))
    assert harness.failure(1) is PushFailure.LOST
    harness.target.device.refuses = False
    sender.push(harness.push(2, 1, [0]))

    assert harness.done(2) == BLOCK_BYTES


def test_without_such_a_device_blocks_pass_through_buffers():
    """Whether the device reads by itself is decided when the receiver is opened."""
    array = BlockArray(4, BLOCK_BYTES)
    blocks = ReadingBlocks(array)
    blocks.reads = False
    links = StagedLinks(
        CONFIG,
        BLOCK_BYTES,
        lambda slab: ArrayCopier(array, slab),
        EventLog(),
        device=blocks,
    )
    receiver = links.listen("shm")

    assert isinstance(receiver, StagedReceiver)
    receiver.close()
