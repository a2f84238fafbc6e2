"""The table of jobs in flight: what each job holds, and which nodes it concerns.

It is the only table. A job that is not in it has ended; its outcome changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headwater.cache.node import Node
from headwater.cache.plan import Job, JobOutcome, LoadJob, OffloadJob
from headwater.types import JobId, Tier


@dataclass(slots=True)
class Segment:
    """Blocks [start, start + count) of `node`, counted from the node's first block."""

    node: Node
    start: int
    count: int


@dataclass(slots=True, eq=False)
class JobRecord:
    """One job in flight and the nodes it concerns; the nodes of one path are in order from the
    root.

    A job describes blocks, never how they are divided into nodes: when a node is split, the
    segments are divided with it. Lookups and removals have no segments.
    """

    plan: Job
    segments: list[Segment] = field(default_factory=list)
    ends: tuple[Node, ...] = ()
    """The last node of each path of the segments."""

    pins_ends: bool = False
    """Whether the job pins the paths of `ends`, on the device.

    Only copies from or to the device need that. A job between host and storage holds the host
    slots that it reads or writes, and nothing on the device: storage may be slow, and admission
    must not wait for it."""

    cold: bool = False
    """The job copies the next victims of the device tier, which become victims again when it
    ends, unless they were used meanwhile."""

    used: frozenset[int] = frozenset()
    """`used` of each of `ends` when a `cold` job began."""

    timed_out: bool = False
    """Timed out and no longer related to any node. Only slots are still kept for the job."""

    deferred: list[JobOutcome] | None = None
    """Outcomes received while a step in flight uses the slots; None when no step does."""

    def is_still_cold(self, node: Node) -> bool:
        """Whether `node` is still a next victim of the device tier. Each release of a node sets
        `used` to a new number, so an unchanged number shows that no request used the node
        meanwhile."""
        return self.cold and node.used in self.used

    def divide(self, head: Node, tail: Node, at: int) -> None:
        """Divide segments as `tail` was split, before its block `at`; `head` has the first part.

        before   | . . . . tail . . . . |     segment: [start, end) of tail
        after    | head  |     tail     |     [start, at) of head, [0, end - at) of tail
                 0       at
        """
        divided: list[Segment] = []
        for segment in self.segments:
            if segment.node is not tail:
                divided.append(segment)
                continue
            start, end = segment.start, segment.start + segment.count
            if start < at:
                divided.append(Segment(head, start, min(end, at) - start))
            if end > at:
                # Positions in the tail are counted from its own first block, which was `at`.
                divided.append(Segment(tail, max(start, at) - at, end - max(start, at)))
        self.segments = divided
        if any(segment.node is head for segment in divided):
            head.jobs = (*head.jobs, self)
        if not any(segment.node is tail for segment in divided):
            tail.jobs = tuple(job for job in tail.jobs if job is not self)


@dataclass(slots=True)
class JobTable:
    """The jobs in flight, by number. `node.jobs` lists the jobs with a segment in that node."""

    by_id: dict[JobId, JobRecord] = field(default_factory=dict)
    _last: int = 0

    def new_id(self) -> JobId:
        """A number that no job has had."""
        self._last += 1
        return JobId(self._last)

    def start(self, record: JobRecord) -> None:
        """Add a job to the table."""
        self.by_id[record.plan.job] = record
        if record.segments:
            for node in _nodes(record):
                node.jobs = (*node.jobs, record)

    def remove(self, record: JobRecord) -> None:
        """Remove a job that has ended from the table and from its nodes."""
        del self.by_id[record.plan.job]
        if record.segments:
            _leave_nodes(record)

    def detach(self, record: JobRecord) -> None:
        """Remove the job from its nodes; it stays in the table."""
        _leave_nodes(record)
        record.segments = []
        record.ends = ()
        record.pins_ends = False

    def to_storage(self) -> set[JobId]:
        """Writes to storage whose executor may still be at work."""
        return {
            number
            for number, record in self.by_id.items()
            if isinstance(record.plan, OffloadJob) and record.plan.target is Tier.STORAGE
        }


def _nodes(record: JobRecord) -> Iterable[Node]:
    """The nodes of a job, each once."""
    segments = record.segments
    if len(segments) == 1:  # the usual case
        return (segments[0].node,)
    return {segment.node for segment in segments}


def _leave_nodes(record: JobRecord) -> None:
    for node in _nodes(record):
        jobs = node.jobs
        node.jobs = () if len(jobs) == 1 else tuple(job for job in jobs if job is not record)


def leading(segments: list[Segment], num_blocks: int) -> list[Segment]:
    """The segments of the first `num_blocks` blocks; the last one is shortened to fit."""
    kept: list[Segment] = []
    for segment in segments:
        if num_blocks <= 0:
            break
        if segment.count > num_blocks:
            segment = Segment(segment.node, segment.start, num_blocks)
        kept.append(segment)
        num_blocks -= segment.count
    return kept


def loading_job(node: Node) -> LoadJob | None:
    """The job that is copying blocks of `node` to a higher tier, if there is one."""
    for record in node.jobs:
        if isinstance(record.plan, LoadJob) and not record.timed_out:
            return record.plan
    return None
