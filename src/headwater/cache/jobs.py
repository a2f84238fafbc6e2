"""Transfers in flight: what each will attach where, and what it holds until then."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.cache.node import Node
from headwater.cache.plan import Promotion, TransferJob
from headwater.types import JobId


@dataclass(slots=True)
class Segment:
    """Blocks [start, start + count) of the run of `node`."""

    node: Node
    start: int
    count: int


@dataclass(slots=True, eq=False)
class JobRecord:
    """One transfer and the part of the tree it concerns, root side first.

    The last node is pinned, and with it the path above, from start to end; splits divide the
    segments, so a job is about blocks and never about how they are cut into nodes.
    """

    transfer: TransferJob
    segments: list[Segment]
    node: Node
    """The last node of the path it pins."""

    cold: bool = False
    """Planned because its blocks were next to be evicted: they are so again afterwards."""

    timed_out: bool = False
    detached: bool = False
    """Timed out, and no longer about any node: only its target slots are kept from others."""

    def divide(self, head: Node, tail: Node, at: int) -> None:
        """`tail` was split before its block `at`, and `head` is the new first part."""
        divided: list[Segment] = []
        for segment in self.segments:
            if segment.node is not tail:
                divided.append(segment)
                continue
            start, end = segment.start, segment.start + segment.count
            if start < at:
                divided.append(Segment(head, start, min(end, at) - start))
            if end > at:
                divided.append(Segment(tail, max(start, at) - at, end - max(start, at)))
        self.segments = divided
        if any(segment.node is head for segment in divided):
            head.jobs = (*head.jobs, self)
        if not any(segment.node is tail for segment in divided):
            tail.jobs = tuple(job for job in tail.jobs if job is not self)


@dataclass(slots=True)
class JobTable:
    """The jobs in flight, by number."""

    by_id: dict[JobId, JobRecord] = field(default_factory=dict)
    _next: int = 0

    def new_id(self) -> JobId:
        """A number that no job has had."""
        self._next += 1
        return JobId(self._next)

    def start(self, job: JobRecord) -> None:
        """`job` is in flight from now on."""
        self.by_id[job.transfer.job] = job
        for node in {segment.node for segment in job.segments}:
            node.jobs = (*node.jobs, job)

    def finish(self, job: JobRecord) -> None:
        """`job` is over: it concerns no node any more."""
        del self.by_id[job.transfer.job]
        _leave(job)

    def detach(self, job: JobRecord) -> None:
        """`job` is still in flight, and concerns no node any more."""
        _leave(job)
        job.segments = []
        job.detached = True


def _leave(job: JobRecord) -> None:
    for node in {segment.node for segment in job.segments}:
        node.jobs = tuple(other for other in node.jobs if other is not job)


def leading(job: JobRecord, num_blocks: int) -> Iterator[tuple[Segment, int]]:
    """The segments of the first `num_blocks` blocks of `job`, the last cut to fit, each with
    the number of blocks before it."""
    at = 0
    for segment in job.segments:
        count = min(segment.count, num_blocks - at)
        if count <= 0:
            return
        yield Segment(segment.node, segment.start, count), at
        at += count


def loading_job(node: Node) -> JobId | None:
    """The job that is bringing blocks of `node` up a tier, if one is."""
    for job in node.jobs:
        if isinstance(job.transfer, Promotion) and not job.timed_out:
            return job.transfer.job
    return None
