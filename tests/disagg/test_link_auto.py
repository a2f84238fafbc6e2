"""The `auto` link: mapped memory on one machine, `tcp` otherwise."""

import gc
import weakref

import pytest

from headwater.disagg.links import auto
from headwater.disagg.links.staging.registry import StagedLinks
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import DeviceError
from headwater.testing.link_contract import LinkHarness, open_harness
from headwater.testing.links import BlockArray
from tests.disagg.staging_doubles import ArrayCopier
from tests.disagg.wire import CONFIG, MakeLinks

BLOCK_BYTES = 1 << 16


def uses_tcp(sender) -> bool:
    """Whether the sender has connected by tcp."""
    return sender._remote is not None


@pytest.fixture
def harness():
    with open_harness(MakeLinks("auto"), "auto", BLOCK_BYTES) as harness:
        yield harness


def test_blocks_are_mapped_on_one_machine(harness):
    """Two instances of one machine do not send block bytes through a socket."""
    sender = harness.sender()
    harness.receiver.open(1, [3])
    sender.push(harness.push(1, 1, [0]))

    assert harness.done(1) == BLOCK_BYTES
    assert not uses_tcp(sender), "and it has no buffers for tcp"


def test_another_machine_uses_tcp(harness, monkeypatch):
    """The address names the machine, so a peer on another one does not try its sockets."""
    monkeypatch.setattr(auto, "machine_id", lambda: "another machine")
    sender = harness.sender()
    harness.receiver.open(1, [3])
    sender.push(harness.push(1, 1, [0]))

    assert harness.done(1) == BLOCK_BYTES
    assert uses_tcp(sender)
    assert (harness.target.rows[3] == harness.source.rows[0]).all()


def test_a_machine_that_cannot_be_named_uses_tcp(monkeypatch):
    """Two systems without a name are not taken for one machine."""
    monkeypatch.setattr(auto, "machine_id", lambda: "")
    with open_harness(MakeLinks("auto"), "auto", BLOCK_BYTES) as harness:
        harness.receiver.open(1, [3])
        sender = harness.sender()
        sender.push(harness.push(1, 1, [0]))

        assert harness.done(1) == BLOCK_BYTES
        assert uses_tcp(sender)


def test_blocks_that_cannot_be_mapped_use_tcp(harness):
    """An instance whose pool is private sends by tcp."""
    private = BlockArray(4, BLOCK_BYTES, seed=1)
    private.file = None
    harness.receiver.open(1, [3])
    sender = harness.sender(private)
    sender.push(harness.push(1, 1, [0]))

    assert harness.done(1) == BLOCK_BYTES
    assert uses_tcp(sender)


def on_device(memory, deliver) -> StagedLinks:
    """Links of an instance whose blocks are on a device that peers can map."""
    return StagedLinks(
        CONFIG,
        memory.block_bytes,
        lambda slab: ArrayCopier(memory, slab),
        deliver,
        device=memory,
    )


@pytest.mark.parametrize("refuses", [False, True])
def test_blocks_on_a_device_are_mapped_or_staged(refuses, monkeypatch, caplog):
    """A device that cannot map the sender's memory gets the same push by tcp, and later pushes
    do not try again."""

    def refuse(file, num_bytes):
        raise DeviceError("the two devices have no connection")

    with open_harness(on_device, "auto", BLOCK_BYTES) as harness:
        if refuses:
            monkeypatch.setattr(harness.target, "map_peer", refuse)
        sender = harness.sender()
        harness.receiver.open(1, [3, 4])
        sender.push(harness.push(1, 1, [0]))
        assert harness.done(1) == BLOCK_BYTES
        sender.push(harness.push(2, 1, [1]))
        assert harness.done(2) == BLOCK_BYTES
        harness.receiver.fence(1)

        assert harness.log.closed(1).blocks == frozenset({0, 1})
        assert harness.log.closed(1).num_bytes == 2 * BLOCK_BYTES
        assert len(harness.log.closings(1)) == 1
        assert uses_tcp(sender) is refuses
        assert (harness.target.rows[3:5] == harness.source.rows[:2]).all()
    warnings = [line for line in caplog.messages if "cannot map this instance's blocks" in line]
    assert len(warnings) == refuses


def test_a_lease_that_one_link_closed_by_itself_is_closed_on_both():
    """A block that could not be copied closes the lease of its link (lesson 50)."""
    copiers = []

    def make(memory, deliver):
        def open_copier(slab):
            copiers.append(ArrayCopier(memory, slab))
            return copiers[-1]

        return StagedLinks(CONFIG, memory.block_bytes, open_copier, deliver)

    with open_harness(make, "auto", BLOCK_BYTES) as harness:
        harness.receiver.open(1, [3])
        for copier in copiers:
            copier.fails = True
        sender = harness.sender()
        copiers[-1].fails = False
        sender.push(harness.push(1, 1, [0]))

        assert harness.log.closed(1).blocks == frozenset()
        assert len(harness.log.closings(1)) == 1


def test_a_push_after_close_fails(harness):
    """Every push has an outcome, also one that would have been repeated."""
    sender = harness.sender()
    sender.close()
    sender.push(harness.push(1, 1, [0]))

    assert harness.failure(1) is PushFailure.CLOSED


def test_closed_links_keep_no_block_memory():
    """The engine seldom collects garbage, so nothing may wait for the collector (lesson 61)."""
    gc.collect()
    gc.disable()
    try:
        harness = LinkHarness(MakeLinks("auto"), "auto", BLOCK_BYTES)
        harness.receiver.open(1, [3])
        harness.sender().push(harness.push(1, 1, [0]))
        assert harness.done(1) == BLOCK_BYTES
        target, source = weakref.ref(harness.target), weakref.ref(harness.source)
        harness.close()
        del harness
        assert target() is None
        assert source() is None
    finally:
        gc.enable()
