"""Simulated devices of an engine: nothing is computed or copied, only time passes."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.cache import JobStatus, LoadJob, Lookup, Removal, TransferJob
from headwater.clock import VirtualClock
from headwater.errors import InvariantError
from headwater.replay.cost import OWN_LINKS, StepCost
from headwater.replay.links import Delivery, SharedLink
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.sequence import Sequence as Decoding
from headwater.storage.base import StorageStats
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import link_of
from headwater.transfer.workers import Plan, Report, Task
from headwater.types import BlockKey, RequestId, Tokens

_LOOKUP_BYTES = 32
"""Bytes of the key of each block that is looked up in storage."""


class Stretch(NamedTuple):
    """Consecutive steps that decode the same rows."""

    end_s: NDArray[np.float64]
    """When each step ends."""

    tokens: Tokens
    """One row per step, one column per sequence."""


class SimRunner:
    """A `Runner` whose steps take the time of the cost model.

    It returns the expected tokens of requests whose output is known. Otherwise it returns
    tokens that are used only once, so that no output is a prefix of another.
    """

    depth = 1
    layerwise = False

    def __init__(
        self, cost: StepCost, clock: VirtualClock, links: Mapping[str, SharedLink]
    ) -> None:
        self._cost = cost
        self._clock = clock
        # Only the instance's own links: the use of shared links by others is not known in
        # advance.
        own = [links[name] for name in OWN_LINKS if name in links]
        self._dragging = [link for link in own if link.cost.step_share > 0]
        self._submitted: deque[ScheduledBatch] = deque()
        self._num_chosen = 0
        self.expected: dict[RequestId, Tokens] = {}
        """Known outputs of requests that have not ended."""

    def submit(self, batch: ScheduledBatch) -> None:
        """Queue `batch`."""
        self._submitted.append(batch)

    def collect(self) -> StepResult:
        """Let the time of the oldest batch pass, and return its result."""
        batch = self._submitted.popleft()
        counts = np.diff(batch.query_start)
        ends = batch.context_lens.astype(np.int64)
        # The last chunk of a prompt may be a single token; its cost is that of a decode row.
        decodes = counts == 1
        context = int(ends[decodes].sum())
        rows = int(decodes.sum())
        counts, ends = counts[~decodes].astype(np.int64), ends[~decodes]
        # Each token of a chunk [start, end) attends to all tokens before it and to itself.
        pairs = int((counts * (ends - counts) + counts * (counts + 1) // 2).sum())
        seconds = self._cost.seconds(
            prompt_tokens=int(counts.sum()), pairs=pairs, rows=rows, context=context
        )
        self._clock.advance(float(seconds) * self._drag())
        chosen = len(batch.sampled)
        tokens = self._choose(1, chosen)[0]
        if self.expected:
            self._replace_expected(batch, tokens)
        return StepResult(step=batch.step, tokens=tokens, logprobs=[None] * chosen)

    def stretch(self, decoding: Sequence[Decoding], num_steps: int, until_s: float) -> Stretch:
        """Run steps that decode one row for each of `decoding`: at most `num_steps`, and only
        those that begin before `until_s`. The clock advances."""
        rows = len(decoding)
        first = sum(s.num_scheduled for s in decoding) + rows
        context = first + rows * np.arange(num_steps, dtype=np.int64)
        seconds = self._cost.seconds(prompt_tokens=0, pairs=0, rows=rows, context=context)
        times = np.concatenate(([self._clock.now()], seconds * self._drag())).cumsum()
        count = int(np.searchsorted(times[:-1], until_s, side="left"))
        ends = times[1 : count + 1]
        if count:
            self._clock.move_to(float(ends[-1]))
        tokens = self._choose(count, rows)
        for row, sequence in enumerate(decoding if self.expected else ()):
            known = self.expected.get(sequence.request_id)
            if known is not None:
                tokens[:, row] = known[sequence.num_output : sequence.num_output + count]
        return Stretch(ends, tokens)

    def close(self) -> None:
        """Nothing to release."""

    def _replace_expected(self, batch: ScheduledBatch, tokens: Tokens) -> None:
        """Replace chosen tokens by known outputs."""
        for at, row in enumerate(batch.sampled.tolist()):
            known = self.expected.get(batch.request_ids[row])
            if known is not None:
                seen, prompt_tokens = batch.histories[at]
                tokens[at] = known[len(seen) - prompt_tokens]

    def _drag(self) -> float:
        return 1.0 + sum(link.cost.step_share for link in self._dragging if link.is_busy)

    def _choose(self, num_steps: int, rows: int) -> Tokens:
        """Choose new tokens, with ids below those of all prompts."""
        start = -1 - self._num_chosen
        self._num_chosen += num_steps * rows
        flat = np.arange(start, start - num_steps * rows, -1, dtype=np.int32)
        return flat.reshape(num_steps, rows)


class SimCopier:
    """A `DeviceCopier` over two links."""

    def __init__(
        self, links: Mapping[str, SharedLink], clock: VirtualClock, block_bytes: int
    ) -> None:
        self._links = links
        self._clock = clock
        self._block_bytes = block_bytes

    def start(self, transfer: TransferJob, report: Report) -> None:
        """Put the copy on its link."""
        blocks = transfer.num_blocks
        link = self._links[link_of(transfer)]

        def arrive(delivery: Delivery) -> None:
            report(JobCompletion(transfer.job, JobStatus.DONE, blocks, delivery.busy_s))

        link.start(blocks * self._block_bytes, arrive, now=self._clock.now())

    def close(self) -> None:
        """Nothing to release."""


class SimStore:
    """The keys in a storage of limited size; the least recently used key is dropped first."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self.num_evicted = 0
        self.num_read = 0
        self.num_written = 0
        self.num_absent = 0

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading keys that are present."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def read(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading keys that are present; they become the most recently used."""
        found = self.leading(keys)
        for key in reversed(keys[:found]):
            self._keys.move_to_end(key)
        self.num_read += found
        self.num_absent += len(keys) - found
        return found

    def write(self, keys: Sequence[BlockKey]) -> None:
        """Add these keys; the first of them becomes the most recently used."""
        for key in reversed(keys):
            self.num_written += key not in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity_blocks:
            self._keys.popitem(last=False)
            self.num_evicted += 1


class SimStorage:
    """A `StorageExecutor` over the links to a `SimStore`, which instances may share."""

    def __init__(
        self,
        store: SimStore,
        links: Mapping[str, SharedLink],
        clock: VirtualClock,
        block_bytes: int,
    ) -> None:
        self._store = store
        self._links = links
        self._clock = clock
        self._block_bytes = block_bytes
        self.num_parallel = links["storage_to_host"].cost.max_jobs or 1

    def start(self, tasks: Sequence[Task]) -> None:
        """Put each job on its link. Which keys storage has is decided when the job ends."""
        for task in tasks:
            self._start(task)

    def _start(self, task: Task) -> None:
        plan = task.plan
        task.claim()  # a deadline that comes first ends the wait, as for a real thread
        size = _LOOKUP_BYTES if isinstance(plan, Lookup) else self._block_bytes

        def arrive(delivery: Delivery) -> None:
            task.report(self._end(plan)._replace(busy_s=delivery.busy_s))

        self._links[link_of(plan)].start(plan.num_blocks * size, arrive, now=self._clock.now())

    def give_up(self, task: Task) -> None:
        """Nothing to do: a simulated call needs no thread."""

    def stats(self) -> StorageStats:
        """Totals of this storage so far."""
        store = self._store
        return StorageStats(
            backend="simulated",
            num_blocks=len(store),
            used_bytes=len(store) * self._block_bytes,
            capacity_bytes=store.capacity_blocks * self._block_bytes,
            blocks_read=store.num_read,
            bytes_read=store.num_read * self._block_bytes,
            blocks_written=store.num_written,
            bytes_written=store.num_written * self._block_bytes,
            blocks_absent=store.num_absent,
            blocks_evicted=store.num_evicted,
            reasons={},
        )

    def close(self) -> None:
        """Nothing to release."""

    def _end(self, plan: Plan) -> JobCompletion:
        if isinstance(plan, Removal):
            raise InvariantError("a simulated store is never asked to forget")
        if isinstance(plan, Lookup):
            found = tuple(self._store.leading(keys) for keys in plan.runs())
            return JobCompletion(plan.job, JobStatus.DONE, found=found)
        if isinstance(plan, LoadJob):
            num_read = self._store.read(plan.keys)
            if num_read < plan.num_blocks:
                return JobCompletion(plan.job, JobStatus.ABSENT, num_read, reason="absent")
            return JobCompletion(plan.job, JobStatus.DONE, num_read)
        self._store.write(plan.keys)
        return JobCompletion(plan.job, JobStatus.DONE, plan.num_blocks)
