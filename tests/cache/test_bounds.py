"""Bounds: the cache's memory is limited by what it holds, and no job holds too much."""

import gc
import tracemalloc

import numpy as np
import pytest

from headwater.cache import (
    CacheConfig,
    FinishedRequest,
    JobOutcome,
    JobStatus,
    TieredCache,
    TokenPath,
)
from headwater.errors import InvariantError
from headwater.types import RequestId, Tier, WritePolicy
from tests.cache.make import (
    begin,
    blocks_by_tier,
    done,
    make_cache,
    make_on_host,
    make_path,
    make_stored,
    serve,
    write_down,
)


def plan_storage_write(cache, *blocks):
    """Serve a path, write it to the host, and start writing it to storage."""
    serve(cache, make_path(*blocks))
    for plan in cache.plan_offloads(limit_blocks=9, limit_stored=0, now=0.0):
        cache.finish_job(done(plan), now=0.0)
    (plan,) = cache.plan_offloads(limit_blocks=0, limit_stored=9, now=0.0)
    assert plan.target is Tier.STORAGE
    return plan


def end(cache, plan, status):
    cache.finish_job(JobOutcome(job=plan.job, status=status), now=0.0)
    cache.check()


def test_a_write_to_storage_holds_nothing_on_the_device():
    """Lesson 74: storage may be slow, so every device block stays available during a write to
    storage."""
    cache = make_stored(4, 8)

    plan = plan_storage_write(cache, 1, 2)

    assert cache.num_available == 4
    slots = cache.take(4, now=0.0)
    assert slots is not None
    cache.check()
    cache.free(slots)
    end(cache, plan, JobStatus.DONE)
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)


def test_a_read_from_storage_holds_nothing_on_the_device():
    """The ancestors of the blocks that are read can be evicted; then the result of the read is
    dropped."""
    cache = make_stored(4, 2)
    serve(cache, make_path(1, 2))
    cache.learn_stored(make_path(1, 2, 3), 3, now=0.0)
    plan = cache.plan_load(cache.match(make_path(1, 2, 3)), limit_blocks=9, now=0.0)
    assert plan is not None
    assert plan.source is Tier.STORAGE

    assert cache.num_available == 4
    cache.free(cache.take(4, now=0.0))
    cache.check()
    end(cache, plan, JobStatus.DONE)

    assert cache.num_available == 4
    assert cache.stats().host.moving == 0


def test_a_slot_that_a_write_reads_is_not_reused():
    """A host block whose parent was evicted leaves the tree, but the write still reads its slot."""
    cache = make_cache(
        4, host_blocks=2, storage=True, write_policy=WritePolicy.NONE, storage_order="arrival"
    )
    serve(cache, make_path(1, 2, 9))
    lease, held = begin(cache, make_path(1, 2, 3))
    cache.commit(lease, make_path(1, 2, 3), held, now=0.0)
    cache._writes.add(lease.node)
    cache.release(lease, now=0.0)
    write_down(cache)
    (plan,) = cache.plan_offloads(limit_blocks=0, limit_stored=9, now=0.0)
    cache.free(cache.take(4, now=0.0))
    cache.check()

    assert blocks_by_tier(cache, make_path(1, 2, 3)) == (0, 0, 0)
    assert cache.stats().host.quarantined == 1
    end(cache, plan, JobStatus.DONE)
    assert cache.stats().host.free == 2


def test_a_reset_during_a_write_to_storage_keeps_its_slots_until_it_ends():
    """The write reads bytes of the old generation; no new block may overwrite them."""
    cache = make_stored(4, 8)
    plan = plan_storage_write(cache, 1, 2)

    cache.reset()
    cache.check()

    assert cache.stats().host.quarantined == 2
    assert cache.num_available == 4
    end(cache, plan, JobStatus.FAILED)
    assert cache.stats().host.free == 8


def test_a_write_to_storage_that_never_returns_holds_only_its_host_slots():
    """After the deadline the device is free, and other blocks can be written and evicted."""
    cache = make_stored(4, 8)
    lost = plan_storage_write(cache, 1, 2)
    end(cache, lost, JobStatus.TIMED_OUT)

    assert cache.num_available == 4
    for block in range(3, 9):
        serve(cache, make_path(block, block + 10))
        write_down(cache)
        write_down(cache)
        cache.check()
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)
    assert cache.num_jobs == 1
    end(cache, lost, JobStatus.QUIET)
    assert cache.num_jobs == 0


def test_nodes_known_only_from_storage_are_bounded():
    """Lesson 77: writing and evicting many prompts keeps at most the configured number of nodes."""
    cache = make_stored(8, 8, max_stored_nodes=10)
    for number in range(200):
        serve(cache, make_path(number, number + 1000))
        write_down(cache)
        write_down(cache)
        assert cache.stats().nodes <= 10 + 8
        cache.check()


def test_the_bound_on_stored_nodes_costs_no_scan(monkeypatch):
    """At the limit, one new node forgets one old node: other nodes are not examined."""
    cache = make_stored(4, 8, max_stored_nodes=1000)
    for number in range(1000):
        cache.learn_stored(make_path(number), 1, now=0.0)
    forgotten = []
    forget = cache._evictor.forget_stored

    def counted(node, *args):
        forgotten.append(node)
        forget(node, *args)

    monkeypatch.setattr(cache._evictor, "forget_stored", counted)
    cache.learn_stored(make_path(5000), 1, now=0.0)

    assert len(forgotten) == 1
    assert cache.stats().nodes == 1000


def test_the_write_queue_has_only_nodes_of_the_tree():
    """While storage accepts no write, evicted nodes leave the queue with their blocks."""
    cache = make_stored(8, 8)
    for number in range(100):
        serve(cache, make_path(number, number + 1000))
        for plan in cache.plan_offloads(limit_blocks=9, limit_stored=0, now=0.0):
            cache.finish_job(done(plan), now=0.0)
        cache.check()

    assert len(list(cache._writes.queued(Tier.HOST))) <= 8


def test_a_write_looks_at_few_of_many_queued_nodes(monkeypatch):
    """A long queue costs a step nothing: one block is planned without a look at the others."""

    class Counting(dict[object, bool]):
        num_seen = 0

        def items(self):
            for item in super().items():
                Counting.num_seen += 1
                yield item

    cache = make_stored(device_blocks=2_000, host_blocks=2_000)
    for number in range(1_000):
        serve(cache, make_path(number))
    monkeypatch.setattr(cache._writes, "_to_host", Counting(cache._writes._to_host))

    (plan,) = cache.plan_offloads(limit_blocks=1, limit_stored=0, now=0.0)

    assert plan.num_blocks == 1
    assert Counting.num_seen <= 100


def test_every_queued_node_is_written_though_the_queue_changes_meanwhile():
    """The queue has more nodes than are looked at together, and some of them have a write in
    flight."""
    cache = make_stored(device_blocks=2_000, host_blocks=2_000)
    for number in range(300):
        serve(cache, make_path(number, number + 1_000))
    started = cache.plan_offloads(limit_blocks=101, limit_stored=0, now=0.0)

    plans = cache.plan_offloads(limit_blocks=9_999, limit_stored=0, now=0.0)

    for plan in (*started, *plans):
        cache.finish_job(done(plan), now=0.0)
    write_down(cache)
    cache.check()
    assert cache.pool_stats(Tier.HOST).cached == 600


def test_a_split_keeps_both_halves_in_the_write_queue():
    """A request that diverges inside a queued node does not cancel the write of its head."""
    cache = make_cache(8, host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(1, 9))
    cache.check()

    write_down(cache)

    assert cache.stats().host.cached == 4


def test_evicted_sessions_keep_no_tokens():
    """A remembered session refers to a node of the tree, so its evicted tokens are freed."""
    cache = make_cache(8)
    for number in range(200):
        path = make_path(number, number + 1000)
        lease, held = begin(cache, path)
        cache.commit(lease, path, held, now=0.0)
        cache.release(lease, now=0.0, finished=FinishedRequest(8, 0, f"s{number}"))
        cache.check()

    entries = list(cache._sessions)
    assert len(entries) == 200
    assert len({entry.node for entry in entries}) <= 9


def test_check_notices_every_bound_that_is_broken(monkeypatch):
    """Violated bounds of stored nodes, the write queue, sessions and ghosts are each
    reported."""
    stored = make_stored(4, 8, max_stored_nodes=1)
    for number in range(3):
        serve(stored, make_path(number))
        write_down(stored)
    monkeypatch.setattr(stored._evictor, "bound_stored", lambda: None)
    stored.reset()
    for number in range(3):
        plan = stored.plan_lookup([(make_path(number), 1)])
        outcome = JobOutcome(job=plan.job, status=JobStatus.DONE, found=(1,))
        stored.finish_job(outcome, now=0.0)
    with pytest.raises(InvariantError, match="3 nodes only in storage, max 1"):
        stored.check()

    queued = make_stored(4, 8)
    serve(queued, make_path(1))
    monkeypatch.setattr(queued._writes, "discard", lambda nodes, tier: None)
    queued.free(queued.take(4, now=0.0))
    with pytest.raises(InvariantError, match="the write queue has a node without blocks"):
        queued.check()

    forgetful = make_cache(2, max_ghosts=4)
    monkeypatch.setattr(forgetful._ghosts, "_half", 1000)
    for number in range(9):
        serve(forgetful, make_path(number))
    with pytest.raises(InvariantError, match="7 ghosts are remembered, max 4"):
        forgetful.check()

    talkative = make_cache(4)
    path = make_path(1)
    lease, held = begin(talkative, path)
    talkative.commit(lease, path, held, now=0.0)
    talkative.release(lease, now=0.0, finished=FinishedRequest(4, 0, "s"))
    monkeypatch.setattr("headwater.cache.audit.MAX_SESSIONS", 0)
    with pytest.raises(InvariantError, match="1 sessions are remembered, max 0"):
        talkative.check()


def test_a_session_whose_end_was_evicted_continues_with_what_is_left():
    """The hint of the session still applies to the leading blocks that are cached."""
    cache = make_cache(4)
    path = make_path(1, 2, 3)
    for end_block in (2, 3):
        part = make_path(*range(1, end_block + 1))
        lease, held = begin(cache, part)
        cache.commit(lease, part, held, now=0.0)
        cache.release(lease, now=0.0, finished=FinishedRequest(8, 0, "s"))
    cache.free(cache.take(2, now=0.0))
    assert blocks_by_tier(cache, path) == (2, 0, 0)

    (entry,) = cache._sessions
    assert cache.match_session(entry).num_blocks == 2


@pytest.mark.parametrize("is_leased", [False, True])
def test_a_reset_leaves_no_garbage(is_leased):
    """Nodes are freed by their reference counts, without a run of the garbage collector."""
    cache = TieredCache(CacheConfig(device_blocks=2_000, block_tokens=64))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(4):
            fill(cache)
            if is_leased:
                path = TokenPath(np.zeros(64, dtype=np.int32))
                lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
            cache.reset()
            if is_leased:
                cache.release(lease, now=0.0)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.enable()

    assert sizes[-1] - sizes[0] < 100_000


def fill(cache):
    """Cache 50 prompts of 40 blocks with a common first block."""
    for number in range(50):
        tokens = np.full(40 * 64, number, dtype=np.int32)
        tokens[:64] = 0
        path = TokenPath(tokens)
        lease = cache.lease(cache.match(path), owner=RequestId("r"), now=0.0)
        slots = cache.take(40 - lease.num_blocks, now=0.0)
        cache.commit(lease, path, slots, now=0.0)
        cache.release(lease, now=0.0)


def test_a_match_is_not_current_after_an_eviction_to_the_host():
    """Blocks that moved to the host are not leased as device blocks."""
    cache = make_cache(4, host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    match = cache.match(make_path(1, 2))
    cache.free(cache.take(4, now=0.0))

    assert not cache.is_current(match)
    lease = cache.lease(match, owner=RequestId("r"), now=0.0)

    assert lease.num_blocks == 0
    cache.check()


def test_an_owner_is_told_after_the_cache_has_applied_the_outcome():
    """There is one dispatch per outcome: the owner sees the new state, and is told each end
    once."""
    cache = make_on_host()
    told = []

    class Owner:
        def finish_job(self, job, outcome, now):
            told.append((job, outcome.status, blocks_by_tier(cache, make_path(1, 2))))

    match = cache.match(make_path(1, 2))
    plan = cache.plan_load(match, limit_blocks=9, now=0.0, owner=Owner())
    cache.finish_job(done(plan), now=0.0)
    cache.finish_job(done(plan), now=0.0)

    assert told == [(plan, JobStatus.DONE, (2, 0, 0))]


def test_a_deferred_outcome_is_applied_later():
    """While a step in flight uses the slots of a job, the end of the job changes nothing."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    cache.defer_job(plan.job)

    end(cache, plan, JobStatus.FAILED)
    assert cache.stats().device.moving == 2

    cache.resume_job(plan.job, now=0.0)
    cache.check()
    assert cache.stats().device.free == 4
    assert cache.num_jobs == 0


def test_an_in_flight_prefix_is_compared_with_media():
    """Blocks count as in flight up to the first that differs in tokens or media."""
    cache = make_cache(16)
    path = make_path(1, 2, 3, 4, media={2: b"cat"})
    lease = cache.lease(cache.match(path), owner=RequestId("a"), now=0.0)
    cache.announce(lease, path)

    same = cache.match(make_path(1, 2, 3, 4, 5, media={2: b"cat"})).in_flight
    other = cache.match(make_path(1, 2, 3, 4, media={2: b"dog"})).in_flight
    shorter = cache.match(make_path(1, 9, 3, 4, media={2: b"cat"})).in_flight

    assert [same.num_blocks, other.num_blocks, shorter.num_blocks] == [4, 2, 1]
