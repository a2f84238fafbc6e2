"""vLLM's secondary tier, as its tiering manager calls it."""

import hashlib
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from headwater.errors import ConfigError
from headwater.plugins.vllm.tier import HeadwaterTier
from tests.plugins.backends import SHARED, end_hanging_calls
from tests.storage.conftest import mooncake_master  # noqa: F401 - a fixture
from tests.waiting import until

BYTES = 8192
STEP = ScheduleEndContext((), ())


def make_spec(model, **changes):
    parallel = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = SimpleNamespace(
        groups=(SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l0", "l1")),),
        worker_kv_bytes_per_block=BYTES,
        model=SimpleNamespace(name=str(model), dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="NHD",
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target = config
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return SimpleNamespace(config=config)


class TierHarness:
    """A tier with its own memory, called like vLLM's scheduler does."""

    def __init__(self, spec, **settings):
        self.memory = np.zeros((64, BYTES), np.uint8)
        self.tier = HeadwaterTier(
            offloading_spec=spec,
            primary_kv_view=memoryview(self.memory),  # type: ignore[arg-type]  # has the protocol
            tier_type="HeadwaterTier",
            **settings,
        )
        self._last = 0

    def run(self, keys, chunks, *, load):
        """Run one job to its end; return its result."""
        self._last += 1
        context = ReqContext(f"job {self._last}")
        job = TransferJob(self._last, keys, np.array(chunks), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        result = self.wait()
        assert result.job_id == self._last
        return result

    def wait(self):
        """The next job that finishes."""
        results: list[Any] = []

        def has_finished():
            results.extend(self.tier.get_finished_jobs())
            return bool(results)

        until(has_finished)
        return results[0]

    def lookup(self, keys, context=None):
        """Which of the keys are hits; the request of `context` stays alive."""
        ends = context is None
        context = context or ReqContext("request")
        answers: list[Any] = []

        def resolved():
            answers[:] = [self.tier.lookup(key, context) for key in keys]
            self.tier.on_schedule_end(STEP)
            return LookupResult.RETRY not in answers

        until(resolved)
        if ends:
            self.tier.on_request_finished(context)
        return [answer is LookupResult.HIT for answer in answers]


def make_offload_keys(count, run="run"):
    hashes = [hashlib.sha256(f"{run} {n}".encode()).digest() for n in range(count)]
    return [make_offload_key(one, 0) for one in hashes]


@pytest.fixture
def make_harness(model):
    harnesses = []
    SHARED.clear()

    def make(spec=None, **settings):
        settings.setdefault("backend", "tests.plugins.backends:SharedMemory")
        settings.setdefault("config", {"name": "store"})
        harnesses.append(TierHarness(spec or make_spec(model), **settings))
        return harnesses[-1]

    yield make
    end_hanging_calls()
    for harness in harnesses:
        harness.tier.shutdown()


def fill(harness, count=40, seed=0):
    rng = np.random.default_rng(seed)
    harness.memory[:count] = rng.integers(0, 256, (count, BYTES), dtype=np.uint8)
    return harness.memory[:count].copy()


def test_another_instance_finds_and_loads_what_one_has_stored(make_harness):
    """The second instance loads more blocks than one storage call takes, with the same
    bytes."""
    first, second = make_harness(), make_harness()
    written, keys = fill(first), make_offload_keys(40)

    stored = first.run(keys, range(40), load=False)
    found = second.lookup(keys)
    loaded = second.run(keys, range(40), load=True)

    assert (stored.success, loaded.success, all(found)) == (True, True, True)
    assert stored.transfer_bytes == 40 * BYTES
    np.testing.assert_array_equal(second.memory[:40], written)


@pytest.mark.slow
def test_chunks_come_back_from_a_mooncake_pool(make_harness, mooncake_master):  # noqa: F811
    """The master is a real one; the tier's memory is registered with it and read in place."""
    config = {"master": mooncake_master.address, "segment_bytes": 1 << 24}
    harness = make_harness(backend="mooncake", config=config)
    written, keys = fill(harness, 20), make_offload_keys(20)

    stored = harness.run(keys, range(20), load=False)
    found = harness.lookup([*keys, *make_offload_keys(1, "other")])
    loaded = harness.run(keys, range(30, 50), load=True)

    assert (stored.success, loaded.success) == (True, True)
    assert found == [True] * 20 + [False]
    np.testing.assert_array_equal(harness.memory[30:50], written)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model__dtype", "float16"),
        ("kv_cache_layout", "HND"),
        ("parallel__tp_size", 2),
        ("cache__tokens_per_hash", 32),
        ("canonical_layout", True),
    ],
)
def test_a_deployment_that_differs_finds_nothing(make_harness, model, name, value):
    """Element type, layout, parallel sizes and block size are part of every key."""
    first, other = make_harness(), make_harness(make_spec(model, **{name: value}))
    fill(first)
    keys = make_offload_keys(4)
    first.run(keys, range(4), load=False)

    assert other.lookup(keys) == [False] * 4


def test_another_hash_seed_or_other_weights_find_nothing(make_harness, model, monkeypatch):
    """vLLM's seed is part of every key, and so is the content of the weights."""
    first = make_harness()
    fill(first)
    keys = make_offload_keys(4)
    first.run(keys, range(4), load=False)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = make_harness()
    monkeypatch.delenv("PYTHONHASHSEED")
    (model / "model.safetensors").write_bytes(b"other weights")
    changed = make_harness()

    assert seeded.lookup(keys) == changed.lookup(keys) == [False] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__name": "org/name"}, "does not pass the revision"),
        ({"kv_cache_layout": None, "model__dtype": "auto"}, "dtype is unknown"),
    ],
)
def test_an_incomplete_identity_is_refused_at_the_start(make_harness, model, change, message):
    """The message says what to set."""
    with pytest.raises(ConfigError, match=message):
        make_harness(make_spec(model, **change))


def test_an_unknown_setting_is_an_error_with_a_suggestion(make_harness):
    """A typo does not silently leave a default in place."""
    with pytest.raises(ConfigError, match="did you mean 'read_timeout_s'"):
        make_harness(read_timeout=1.0)


def test_a_flipped_bit_is_a_failed_block_and_a_miss_afterwards(make_harness):
    """Blocks before the damaged one are kept; the request does not look up the rest again."""
    harness = make_harness()
    written, keys = fill(harness, 4), make_offload_keys(4)
    harness.run(keys, range(4), load=False)
    third = list(SHARED["store"].values.values())
    damaged = next(v for v in third if bytes(v[160:]) == written[2].tobytes())
    damaged[160 + 100] ^= 1
    context = ReqContext("request")
    assert all(harness.lookup(keys, context))

    result = harness.run(keys, range(10, 14), load=True)

    assert not result.success
    assert list(result.successful_keys) == keys[:2]
    np.testing.assert_array_equal(harness.memory[10:12], written[:2])
    assert not harness.memory[12].any()
    assert harness.lookup(keys, context) == [True, True, False, False]


def test_storage_that_never_answers_costs_a_miss_not_a_request(make_harness):
    """A lookup ends at its deadline, a load fails, and memory is not touched later."""
    harness = make_harness(lookup_timeout_s=0.05, read_timeout_s=0.1)
    fill(harness, 4)
    keys = make_offload_keys(4)
    harness.run(keys, range(4), load=False)
    store = SHARED["store"]
    store.hang = Event()

    assert harness.lookup(keys) == [False] * 4
    result = harness.run(keys, range(10, 14), load=True)
    store.hang.set()

    assert not result.success
    assert result.successful_keys is None
    until(lambda: not harness.tier.has_pending_work())
    assert not harness.memory[10:14].any()


def test_a_store_that_hangs_keeps_its_chunks_until_it_returns(make_harness):
    """vLLM must not reuse memory that a write still reads, so the job stays open until then."""
    harness = make_harness(write_timeout_s=0.05)
    fill(harness, 4)
    harness.tier.on_schedule_end(STEP)
    store = SHARED["store"]
    store.hang = Event()
    job = TransferJob(1, make_offload_keys(4), np.arange(4), False, ReqContext("request"))
    harness.tier.submit_store(job)
    until(
        lambda: (
            harness.tier.get_finished_jobs() or "timeout" in str(harness.tier.get_stats().data)
        )
    )

    assert not harness.tier.get_finished_jobs()
    assert not harness.tier.has_pending_work()  # vLLM would make steps without end
    store.hang.set()
    assert not harness.wait().success


def test_waiting_stores_hold_at_most_half_of_the_cpu_tier(make_harness):
    """vLLM cannot evict a chunk that waits to be written, so while storage hangs only half of
    the chunks may wait. A job beyond that fails, and its chunks are free again."""
    harness = make_harness()
    store = SHARED["store"]
    store.hang = Event()
    for n in range(4):  # as many as are written at once
        job = TransferJob(
            n, make_offload_keys(1, f"w{n}"), np.array([n]), False, ReqContext("r")
        )
        harness.tier.submit_store(job)
    for n in range(3):
        keys, chunks = make_offload_keys(16, f"r{n}"), np.arange(16) + 4 + 16 * n
        harness.tier.submit_store(TransferJob(10 + n, keys, chunks, False, ReqContext("r")))

    assert [(one.job_id, one.success) for one in harness.tier.get_finished_jobs()] == [
        (12, False)
    ]
    assert "headwater:storage_writes_waiting" in str(harness.tier.get_stats().data)
    store.hang.set()
    done: list[Any] = []

    def have_ended():
        done.extend(harness.tier.get_finished_jobs())
        return len(done) == 6

    until(have_ended)
    assert all(one.success for one in done)


def test_broken_storage_fails_stores_and_later_serves_again(make_harness):
    """Stores fail at once while the breaker is open, and nothing waits."""
    harness = make_harness()
    fill(harness, 4)
    store = SHARED["store"]
    store.broken = True

    results = [harness.run(make_offload_keys(1, f"r{n}"), [n], load=False) for n in range(4)]

    assert [result.success for result in results] == [False] * 4
    data = harness.tier.get_stats().data
    assert "headwater:storage_write_breaker_open" in str(data)


def test_short_hashes_are_never_stored_or_found(make_harness):
    """xxhash is not collision resistant: two prompts with the same hash can be constructed."""
    harness = make_harness()
    fill(harness, 1)
    short = [make_offload_key(b"x" * 16, 0)]

    assert not harness.run(short, [0], load=False).success
    assert harness.lookup(short) == [False]


def test_draining_ends_every_job(make_harness):
    """After a reset of vLLM's cache no call touches its memory."""
    harness = make_harness()
    fill(harness)
    keys = make_offload_keys(40)
    for n in range(4):
        part = slice(n * 10, (n + 1) * 10)
        chunks = np.arange(40)[part]
        harness.tier.submit_store(
            TransferJob(n, keys[part], chunks, False, ReqContext("request"))
        )

    harness.tier.drain_jobs()

    assert sorted(result.job_id for result in harness.tier.get_finished_jobs()) == [0, 1, 2, 3]
    assert not harness.tier.has_pending_work()


def test_prefixes_that_were_asked_for_before_are_written_first(make_harness):
    """While storage hangs, jobs wait; the most used prefix is next when storage answers
    again."""
    harness = make_harness()
    fill(harness)
    used, new, busy = (make_offload_keys(4, run) for run in ("used", "new", "busy"))
    for n in range(2):
        context = ReqContext(f"past {n}")
        for place, key in enumerate(used):
            context.set_offload_key_position(key, 16 * (place + 1))
        harness.tier.on_request_finished(context)
    harness.lookup(make_offload_keys(1))
    store = SHARED["store"]
    store.hang = Event()
    for n, key in enumerate(busy):
        harness.tier.submit_store(
            TransferJob(n, [key], np.array([n]), False, ReqContext("busy"))
        )
    for n, keys in enumerate((new, used)):
        chunks = np.arange(4) + 4 * (n + 1)
        harness.tier.submit_store(
            TransferJob(10 + n, keys, chunks, False, ReqContext("request"))
        )

    transfer, _, _ = harness.tier._writes.pop()

    assert transfer.keys == used
    store.hang.set()
