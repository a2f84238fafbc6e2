"""Messages between ranks: a step, a copy, files, and the end of a connection."""

import os
import socket
import threading

import numpy as np
import pytest

from headwater.cache import LoadJob, OffloadJob
from headwater.clock import SystemClock
from headwater.device.parallel.channel import ChannelClosed, RankChannel, RankMessage
from headwater.device.parallel.messages import CopyBlocks
from headwater.device.parallel.ranks import Rank, Ranks
from headwater.device.parallel.step_message import StepPacker, StepUnpacker
from headwater.errors import ConfigError
from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import SamplingParams
from headwater.types import JobId, RequestId, Tier


def _batch(names: list[str]) -> ScheduledBatch:
    rows = len(names)
    return ScheduledBatch(
        step=12,
        request_ids=[RequestId(name) for name in names],
        tokens=np.arange(rows + 2, dtype=np.int32),
        positions=np.arange(rows + 2, dtype=np.int32) + 5,
        query_start=np.array([0, *range(3, rows + 3)], dtype=np.int32),
        context_lens=np.full(rows, 9, dtype=np.int32),
        block_tables=[np.array([4, 1, 2 * row], dtype=np.int64) for row in range(rows)],
        sampled=np.arange(rows, dtype=np.int32),
        params=[SamplingParams(temperature=0.0)] * rows,
        carry=np.full(rows, -1, dtype=np.int32),
        scored={1: (np.array([8, 9], dtype=np.int32), 3)},
    )


def test_a_rank_sees_the_step_that_was_packed() -> None:
    """Everything that is needed to compute arrives; names, parameters and histories do not."""
    batch = _batch(["a", "b", "c"])

    seen = StepUnpacker().unpack(StepPacker().pack(batch, batch.tokens))

    assert seen.step == 12
    for name in ("tokens", "positions", "query_start", "context_lens", "sampled", "carry"):
        assert np.array_equal(getattr(seen, name), getattr(batch, name)), name
    for ours, theirs in zip(seen.block_tables, batch.block_tables, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(seen.scored_places(), batch.scored_places())
    assert seen.params == []


def test_a_request_keeps_its_number_while_it_runs() -> None:
    """A rank recognises a sequence by its number; sequences that left are forgotten."""
    packer, unpacker = StepPacker(), StepUnpacker()

    def seen(*names: str) -> ScheduledBatch:
        return unpacker.unpack(packer.pack(_batch(list(names)), np.zeros(4, dtype=np.int32)))

    first, second, third = seen("a", "b"), seen("b", "c"), seen("a", "c")

    assert second.request_ids[0] == first.request_ids[1]
    assert third.request_ids[1] == second.request_ids[1]
    assert len({*first.request_ids, *second.request_ids, *third.request_ids}) == 4
    assert len(packer._known) == len(unpacker._tables) == 2


def test_a_table_is_sent_again_only_when_it_is_another_array() -> None:
    """A rank keeps the tables of the previous step; a table that grew, moved or returned is
    sent."""
    packer, unpacker = StepPacker(), StepUnpacker()
    batch = _batch(["a", "b", "c"])
    other = _batch(["c", "a", "d"])
    other.block_tables[:2] = [batch.block_tables[2], batch.block_tables[0]]
    grown = _batch(["c", "a", "d"])
    grown.block_tables[0] = np.array([4, 1, 4, 9], dtype=np.int64)
    grown.block_tables[1:] = other.block_tables[1:]
    sizes = []

    for step in (batch, batch, other, grown, batch):
        message = packer.pack(step, step.tokens)
        sizes.append(len(message))
        seen = unpacker.unpack(message)
        for ours, theirs in zip(seen.block_tables, step.block_tables, strict=True):
            assert np.array_equal(ours, theirs)

    assert sizes[1] == sizes[0] - 4 * 9
    assert sizes[2] == sizes[1] + 4 * 3
    assert sizes[3] == sizes[1] + 4 * 4


@pytest.mark.parametrize("kind", [LoadJob, OffloadJob])
def test_a_copy_arrives_as_it_was_planned(kind: type[LoadJob]) -> None:
    """The message has the direction, the slots of both sides, and the number that its answer
    repeats."""
    slots = np.array([3, 4, 9]), np.array([1, 7, 0])
    job = kind(
        job=JobId(77),
        source=Tier.HOST,
        target=Tier.DEVICE,
        source_slots=slots[0],
        target_slots=slots[1],
    )

    copy = CopyBlocks.unpack(CopyBlocks(5, 2, job).pack())

    assert (copy.serial, copy.slab, type(copy.job)) == (5, 2, kind)
    assert np.array_equal(copy.job.source_slots, slots[0])
    assert np.array_equal(copy.job.target_slots, slots[1])


def test_messages_of_any_size_and_files_arrive_in_order() -> None:
    """One message is larger than the socket's buffer, one has a descriptor, one is empty."""
    ours, theirs = (RankChannel(end, send_timeout_s=10) for end in socket.socketpair())
    large = os.urandom(20 << 20)
    read, write = os.pipe()

    def send() -> None:
        ours.send(RankMessage.STEP, large)
        ours.send(RankMessage.SLAB, b"x", [write])
        ours.send(RankMessage.LOADED)

    thread = threading.Thread(target=send)
    thread.start()
    first, second, third = (theirs.receive() for _ in range(3))
    thread.join()

    assert (first.kind, bytes(first.payload)) == (RankMessage.STEP, large)
    assert (second.kind, bytes(second.payload)) == (RankMessage.SLAB, b"x")
    assert (third.kind, bytes(third.payload)) == (RankMessage.LOADED, b"")
    os.write(second.files[0], b"hello")
    assert os.read(read, 5) == b"hello"
    for file in (read, write, *second.files):
        os.close(file)
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive()
    theirs.close()


def test_a_rank_that_reads_nothing_is_an_error_after_the_deadline() -> None:
    """The sender does not wait for ever when the socket is full."""
    ours, theirs = socket.socketpair()
    channel = RankChannel(ours, send_timeout_s=0.05)
    with pytest.raises(BlockingIOError):
        channel.send(RankMessage.STEP, bytes(64 << 20))
    channel.close()
    theirs.close()


class _NoProcess:
    """The process of a rank that is only a channel here."""

    def describe_end(self) -> str:
        return "was killed by SIGKILL"

    def kill(self) -> None:
        """There is nothing to kill."""


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ("ends", "rank 1 of 2 failed: its process was killed by SIGKILL"),
        ("fails", "rank 1 of 2 failed: no memory is left"),
        ("hangs", "rank 1 of 2 did not answer LOADED within 0.05 s"),
        ("confuses", "rank 1 answered READY instead of LOADED"),
    ],
)
def test_a_rank_that_does_not_start_is_one_error(event: str, sentence: str) -> None:
    """Rank 0 waits for an answer that does not come; the message has the rank and the reason."""
    ours, theirs = (RankChannel(end, send_timeout_s=10) for end in socket.socketpair())
    ranks = Ranks([Rank(number=1, channel=ours, process=_NoProcess())], SystemClock())
    match event:
        case "ends":
            theirs.close()
        case "fails":
            theirs.send(RankMessage.FAILED, b"no memory is left")
        case "confuses":
            theirs.send(RankMessage.READY)
    with pytest.raises(ConfigError, match=sentence):
        ranks.hear(RankMessage.LOADED, timeout_s=0.05 if event == "hangs" else 10.0)
    ranks.close()
    theirs.close()
