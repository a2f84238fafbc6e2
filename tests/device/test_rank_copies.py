"""Copies that every rank takes part in: when one is done, and when it has failed."""

import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import pytest

from headwater.cache import JobStatus, OffloadJob, TransferJob
from headwater.clock import SystemClock
from headwater.device.parallel.channel import RankChannel, RankMessage
from headwater.device.parallel.copier import ParallelCopier, RankCopies
from headwater.device.parallel.messages import CopyBlocks, pack_copied
from headwater.device.parallel.ranks import Rank, Ranks
from headwater.transfer.completions import JobCompletion
from headwater.types import JobId, Tier

Report = Callable[[JobCompletion], None]


class NoProcess:
    """A rank is a channel here."""

    def describe_end(self) -> str:
        return "has ended"

    def kill(self) -> None:
        """There is nothing to kill."""


class HeldCopier:
    """Rank 0's copier; a test ends its copies."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def start(self, transfer: TransferJob, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        """No copy is left."""


class ThreeRanks:
    """Rank 0's copier, and the other ends of the channels to ranks 1 and 2."""

    def __init__(self) -> None:
        self._others, ranks = [], []
        for number in (1, 2):
            ours, theirs = (RankChannel(end, send_timeout_s=10) for end in socket.socketpair())
            self._others.append(theirs)
            ranks.append(Rank(number=number, channel=ours, process=NoProcess()))
        self._ranks = Ranks(ranks, SystemClock())
        self._own = HeldCopier()
        self._copier = ParallelCopier(RankCopies(self._ranks), self._own, slab=0)
        self.ended: SimpleQueue[JobCompletion] = SimpleQueue()

    def start(self) -> list[int]:
        """Start a copy; return the serial number that each of the other ranks received."""
        slots = np.arange(4)
        job = OffloadJob(
            job=JobId(7),
            source=Tier.DEVICE,
            target=Tier.HOST,
            source_slots=slots,
            target_slots=slots,
        )
        self._copier.start(job, self.ended.put)
        return [CopyBlocks.unpack(other.receive().payload).serial for other in self._others]

    def end(self, rank: int, serial: int, status: JobStatus, busy_s: float = 0.0) -> None:
        """End one rank's part."""
        completion = JobCompletion(JobId(serial), status, 4, busy_s)
        if rank == 0:
            self._own.reports.pop(0)(completion)
        else:
            self._others[rank - 1].send(RankMessage.COPIED, pack_copied(completion))

    def close(self) -> None:
        self._ranks.close()
        for other in self._others:
            other.close()


@pytest.fixture
def ranks() -> Iterator[ThreeRanks]:
    opened = ThreeRanks()
    yield opened
    opened.close()


def test_a_copy_is_done_when_every_rank_has_done_its_part(ranks: ThreeRanks) -> None:
    """Every rank hears the same number; the slowest part is the time of the copy."""
    one, other = ranks.start()
    assert one == other
    ranks.end(1, one, JobStatus.DONE, busy_s=0.5)
    ranks.end(0, one, JobStatus.DONE, busy_s=0.1)
    assert ranks.ended.empty()
    ranks.end(2, one, JobStatus.DONE, busy_s=0.2)

    completion = ranks.ended.get(timeout=10)
    assert completion == JobCompletion(JobId(7), JobStatus.DONE, 4, 0.5)


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_copy_that_one_rank_could_not_do_has_failed_when_the_others_are_quiet(
    failed: int, ranks: ThreeRanks
) -> None:
    """Until the last rank has ended its part, the slots may still be written, so nothing is
    reported."""
    serial, _ = ranks.start()
    *others, last = [rank for rank in range(3) if rank != failed]
    ranks.end(failed, serial, JobStatus.FAILED)
    for rank in others:
        ranks.end(rank, serial, JobStatus.DONE)
    assert ranks.ended.empty()
    ranks.end(last, serial, JobStatus.DONE)

    completion = ranks.ended.get(timeout=10)
    assert (completion.status, completion.num_blocks) == (JobStatus.FAILED, 0)
    assert completion.reason == "rank"


def test_copies_may_end_in_another_order_than_they_began(ranks: ThreeRanks) -> None:
    """The number in an answer says which copy it belongs to."""
    first, second = ranks.start()[0], ranks.start()[0]
    assert first != second
    for rank in (1, 2):
        ranks.end(rank, second, JobStatus.DONE)
        ranks.end(rank, first, JobStatus.FAILED)
    for serial in (first, second):
        ranks.end(0, serial, JobStatus.DONE)

    statuses = {ranks.ended.get(timeout=10).status for _ in range(2)}
    assert statuses == {JobStatus.DONE, JobStatus.FAILED}
