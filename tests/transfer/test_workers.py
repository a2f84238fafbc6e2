"""Storage threads: calls that block, hang, fail or give wrong answers delay nothing else."""

import threading

import numpy as np
import pytest

from headwater.cache import JobStatus, LoadJob, Lookup, OffloadJob, TokenPath
from headwater.cache.keys import KeyScheme
from headwater.clock import SystemClock
from headwater.errors import StorageError, StorageTimeout, StorageUnavailable
from headwater.storage.base import BlockWrite
from headwater.storage.codec import BlockFormat, decode_header
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.transfer.mover import Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import MAX_LOST, StorageWorkers
from headwater.types import EMPTY, BlockKey, JobId, Tier

FORM = BlockFormat(fingerprint=bytes(32), block_bytes=64)
ROOT = BlockKey(bytes(32))


def make_keys(count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([n + 1]) * 32) for n in range(count))


def make_read(job: int, slots: list[int]) -> LoadJob:
    return LoadJob(
        job=JobId(job),
        source=Tier.STORAGE,
        target=Tier.HOST,
        source_slots=EMPTY,
        target_slots=np.array(slots),
        keys=make_keys(len(slots)),
    )


def make_write(job: int, slots: list[int]) -> OffloadJob:
    return OffloadJob(
        job=JobId(job),
        source=Tier.HOST,
        target=Tier.STORAGE,
        source_slots=np.array(slots),
        target_slots=EMPTY,
        keys=make_keys(len(slots)),
        parent=ROOT,
    )


class Blocking(MemoryStorage):
    """Writes wait for a gate; the result of a call can be set."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig(), FORM)
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.error: Exception | None = None
        self.results: list[BlockWrite] | None = None

    def write(self, keys, blocks, *, parents, timeout_s):
        self.begun.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        if self.results is not None:
            return self.results
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)


class WorkersHarness:
    def __init__(self) -> None:
        self.storage = Blocking()
        self.slab = HostSlab(8, 64)
        self.workers = StorageWorkers(self.storage, self.slab, SystemClock())
        self.mover = Mover(None, self.workers, TransferConfig())

    def outcomes(self, count: int) -> dict[int, tuple[JobStatus, int]]:
        """Wait for the next `count` outcomes and return them."""
        found: dict[int, tuple[JobStatus, int]] = {}
        while len(found) < count:
            self.mover.completions.wait(10)
            for outcome in self.mover.take(now=0.0):
                found[outcome.job] = outcome.status, outcome.num_blocks
        return found


@pytest.fixture
def harness():
    harness = WorkersHarness()
    yield harness
    harness.storage.gate.set()
    harness.mover.close()


def make_lookup(job: int, *paths: list[int]) -> Lookup:
    scheme = KeyScheme(block_tokens=2, fingerprint=bytes(32), kv_format="", shard="")
    asked = ((TokenPath(np.array(path, dtype=np.int32)), len(path) // 2) for path in paths)
    return Lookup(job=JobId(job), questions=tuple(asked), scheme=scheme)


@pytest.mark.parametrize("error", [None, StorageError("gone"), StorageTimeout("late")])
def test_a_lookup_is_one_call(harness, error):
    """Lesson 25: there is one call and one outcome for any number of paths, also when the call
    fails."""
    asked = []

    def contains(runs, *, timeout_s):
        asked.append([len(run) for run in runs])
        if error is not None:
            raise error
        return [min(len(run), 2) for run in runs]

    harness.storage.contains = contains

    harness.mover.start([make_lookup(1, *(list(range(2 * n)) for n in (1, 2, 3)))], now=0.0)

    harness.mover.completions.wait(10)
    (ended,) = harness.mover.take(now=0.0)
    assert asked == [[1, 2, 3]]
    assert (ended.status, ended.found) == (
        (JobStatus.DONE, (1, 2, 2)) if error is None else (JobStatus.FAILED, ())
    )


def test_blocks_are_written_to_storage_and_read_back(harness):
    """Lesson 40: bytes go directly from one slot into another; writing again moves nothing."""
    harness.storage.gate.set()
    for slot in range(3):
        harness.slab.rows[slot] = slot + 1
    harness.mover.start([make_write(1, [0, 1, 2])], now=0.0)
    assert harness.outcomes(1) == {1: (JobStatus.DONE, 3)}
    harness.mover.start([make_write(2, [0, 1, 2])], now=0.0)
    assert harness.outcomes(1) == {2: (JobStatus.DONE, 3)}

    harness.mover.start([make_read(3, [5, 6, 7])], now=0.0)

    assert harness.outcomes(1) == {3: (JobStatus.DONE, 3)}
    assert [set(harness.slab.rows[slot].tolist()) for slot in (5, 6, 7)] == [{1}, {2}, {3}]
    assert harness.storage.stats().blocks_written == 3
    parents = [decode_header(harness.storage.values[key]).parent for key in make_keys(3)]
    assert parents == [ROOT, *make_keys(2)], "each says which block it follows"


def test_a_write_that_blocks_delays_no_read(harness):
    """Lesson 13: the loop and other kinds of calls continue."""
    harness.mover.start([make_write(n, [0]) for n in range(10)], now=0.0)
    harness.storage.begun.wait()

    harness.mover.start([make_read(20, [1])], now=0.0)

    assert harness.outcomes(1) == {20: (JobStatus.ABSENT, 0)}
    harness.storage.gate.set()
    assert all(ending is JobStatus.DONE for ending, _ in harness.outcomes(10).values())


def test_a_damaged_block_shortens_the_hit(harness):
    """Lesson 44: the complete leading blocks count, and the reason is counted."""
    harness.storage.gate.set()
    harness.mover.start([make_write(1, [0, 1, 2])], now=0.0)
    harness.outcomes(1)
    key = make_keys(3)[1]
    harness.storage.values[key] = harness.storage.values[key][:-1] + b"?"

    harness.mover.start([make_read(2, [5, 6, 7])], now=0.0)

    assert harness.outcomes(1) == {2: (JobStatus.DAMAGED, 1)}
    assert harness.mover.links["storage_to_host"].failures == {"damaged": 1}


def test_a_refused_write_counts_what_was_stored(harness):
    """Lesson 43: a full store is a shorter write, not an error."""
    harness.storage.gate.set()
    harness.storage.results = [BlockWrite.WRITTEN, BlockWrite.PRESENT, BlockWrite.REFUSED]

    harness.mover.start([make_write(1, [0, 1, 2])], now=0.0)

    assert harness.outcomes(1) == {1: (JobStatus.PARTIAL, 2)}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StorageError("gone"), "error"),
        (StorageTimeout("late"), "timeout"),
        (StorageUnavailable("later"), "breaker_open"),
        (KeyError(), "bug"),
    ],
)
def test_whatever_a_backend_raises_ends_one_job(harness, error, reason):
    """Lesson 24: the failure is counted by its reason, and the thread continues with the next
    task."""
    harness.storage.gate.set()
    harness.storage.error = error
    harness.mover.start([make_write(1, [0])], now=0.0)
    assert harness.outcomes(1) == {1: (JobStatus.FAILED, 0)}
    assert harness.mover.links["host_to_storage"].failures == {reason: 1}

    harness.storage.error = None
    harness.mover.start([make_write(2, [0])], now=0.0)

    assert harness.outcomes(1) == {2: (JobStatus.DONE, 1)}


def test_a_backend_that_is_not_quiet_keeps_the_slots(harness):
    """Lesson 50: TIMED_OUT is reported first, and QUIET only when the backend cannot touch the
    slots any more."""
    quiet = threading.Event()
    harness.storage.gate.set()
    harness.storage.error = StorageTimeout("late", quiet=quiet)

    harness.mover.start([make_write(1, [0])], now=0.0)

    assert harness.outcomes(1) == {1: (JobStatus.TIMED_OUT, 0)}
    assert harness.mover.num_in_flight == 1
    quiet.set()
    assert harness.outcomes(1) == {1: (JobStatus.QUIET, 0)}


WRONG_ANSWERS = [
    ("contains", answer)
    for answer in ([-1], [1.5], ["3"], [None], [10**6], [], [0, 0], None, 7, object())
] + [("read", answer) for answer in ([], [True], ["read"], None, [None] * 5)]


@pytest.mark.parametrize(("method", "answer"), WRONG_ANSWERS)
def test_a_wrong_answer_of_a_plug_in_is_a_miss(harness, method, answer):
    """For any answer of a backend, the loop gets a failed job, and the reason is counted."""
    setattr(harness.storage, method, lambda *_, **__: answer)
    plan = make_lookup(1, [1, 2]) if method == "contains" else make_read(1, [0])

    harness.mover.start([plan], now=0.0)

    assert harness.outcomes(1) == {1: (JobStatus.FAILED, 0)}
    link = "lookup" if method == "contains" else "storage_to_host"
    assert harness.mover.links[link].failures == {"error": 1}


@pytest.mark.parametrize("answer", [[], [BlockWrite.WRITTEN] * 2, [0], ["written"], None])
def test_a_wrong_answer_of_a_write_is_a_failed_write(harness, answer):
    """A block counts as stored only if the backend clearly reported it."""
    harness.storage.write = lambda *_, **__: answer

    harness.mover.start([make_write(1, [0])], now=0.0)

    assert harness.outcomes(1) == {1: (JobStatus.FAILED, 0)}


def hang_lookups(harness) -> threading.Event:
    """Make every lookup wait for an event."""
    gate = threading.Event()

    def contains(runs, *, timeout_s):
        gate.wait()
        return [len(run) for run in runs]

    harness.storage.contains = contains
    return gate


def test_lost_threads_are_replaced_up_to_a_bound(harness):
    """Lesson 75: calls that never return cost threads, not lookups. At the bound, later lookups
    fail at once instead of waiting in a queue that no thread serves."""
    gate = hang_lookups(harness)
    bound = 2 + MAX_LOST
    for number in range(bound):
        harness.mover.start([make_lookup(number, [1, 2])], now=0.0)
        while harness.workers._queues["lookup"].qsize():
            pass
        harness.mover.take(now=6.0)  # past its deadline

    assert harness.workers.stats().threads_lost == bound
    assert harness.workers._num_alive["lookup"] == 0
    harness.mover.start([make_lookup(99, [1, 2])], now=0.0)
    assert harness.outcomes(1) == {99: (JobStatus.FAILED, 0)}
    assert harness.mover.links["lookup"].failures["threads_lost"] == 1

    gate.set()
    while harness.workers.stats().threads_lost:
        pass
    harness.mover.start([make_lookup(100, [1, 2])], now=0.0)
    assert harness.outcomes(1) == {100: (JobStatus.DONE, 0)}


def test_a_thread_that_ends_at_its_deadline_is_not_lost(harness):
    """The thread's task has ended: giving it up afterwards changes no count."""
    harness.mover.start([make_lookup(1, [1, 2])], now=0.0)
    task = harness.mover._running[JobId(1)].task
    harness.outcomes(1)
    while not task.has_ended:
        pass

    harness.workers.give_up(task)

    assert harness.workers.stats().threads_lost == 0


def test_threads_never_keep_a_process_from_ending(harness):
    """Lesson 17: the threads are daemons, and closing waits for none of them."""
    harness.mover.start([make_write(1, [0])], now=0.0)
    harness.storage.begun.wait()

    harness.mover.close()

    storage_threads = [t for t in threading.enumerate() if t.name.startswith("storage-")]
    assert storage_threads
    assert all(thread.daemon for thread in storage_threads)
