"""Transfers between tiers: what is written when, where it arrives, what stays pinned until
then."""

import pytest

from headwater.cache import (
    JobEffect,
    JobOutcome,
    JobStatus,
    MissReason,
)
from headwater.types import Tier, WritePolicy
from tests.cache.make import (
    begin,
    blocks_by_tier,
    done,
    make_cache,
    make_on_host,
    make_path,
    serve,
    write_down,
)


@pytest.mark.parametrize(
    ("policy", "after_first", "after_hit", "after_eviction"),
    [
        (WritePolicy.WRITE_THROUGH, 2, 2, 2),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 0, 2, 2),
        (WritePolicy.WRITE_BACK, 0, 0, 2),
        (WritePolicy.NONE, 0, 0, 0),
    ],
)
def test_write_policies(policy, after_first, after_hit, after_eviction):
    """Lesson 14: each policy is an explicit setting that does what it says."""
    cache = make_cache(4, host_blocks=8, write_policy=policy, write_ahead_blocks=2)
    path = make_path(1, 2)
    serve(cache, path)
    write_down(cache)
    assert cache.stats().host.cached == after_first
    serve(cache, path)
    write_down(cache)
    assert cache.stats().host.cached == after_hit

    slots = cache.take(2, now=0.0)
    write_down(cache)
    cache.take(2, now=0.0)

    assert blocks_by_tier(cache, path) == (0, after_eviction, 0)
    cache.free(slots)
    cache.check()


def test_selective_writes_wait_for_the_nth_hit():
    """`select_hits` is how often a block must be found before it is worth a copy."""
    cache = make_cache(
        host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, select_hits=2
    )
    written = []
    for _ in range(3):
        serve(cache, make_path(1, 2))
        write_down(cache)
        written.append(cache.stats().host.cached)

    assert written == [0, 0, 2]


def test_the_second_write_moves_nothing():
    """Lesson 40: a block that the lower tier has already is not written again."""
    cache = make_cache(host_blocks=8, storage=True, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    write_down(cache)
    assert blocks_by_tier(cache, make_path(1, 2)) == (2, 0, 0)
    assert cache.match(make_path(1, 2)).nodes[0].num_stored == 2
    serve(cache, make_path(1, 2))

    assert cache.plan_offloads(limit_blocks=99, now=0.0) == []


def test_saving_writes_whatever_the_policy():
    """Lesson 29: the blocks of a preempted sequence are written, and pinned until then."""
    cache = make_cache(2, host_blocks=4, write_policy=WritePolicy.NONE)
    path = make_path(1, 2)
    lease, held = begin(cache, path)
    cache.commit(lease, path, held, now=0.0)
    cache.save(lease)
    cache.release(lease, now=0.0)

    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)
    assert cache.take(1, now=0.0) is None
    cache.finish_job(done(plan), now=0.0)
    assert len(cache.take(2, now=0.0)) == 2
    assert blocks_by_tier(cache, path) == (0, 2, 0)


def test_a_loaded_block_is_findable_when_the_load_has_ended():
    """Lesson 20: a load that was started and has not ended makes no block findable."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    assert (plan.source, plan.target, plan.num_blocks) == (Tier.HOST, Tier.DEVICE, 2)
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)
    assert cache.finish_job(done(plan), now=0.0) is JobEffect.ATTACHED
    assert blocks_by_tier(cache, make_path(1, 2)) == (2, 0, 0)
    cache.check()


def test_source_and_target_are_pinned_until_the_end():
    """Lesson 21: neither the host copy nor the new slots can be reused."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    assert cache._evictor.evict_host(8) == 0
    assert cache.take(3, now=0.0) is None
    cache.finish_job(done(plan), now=0.0)
    assert cache._evictor.evict_host(8) == 2
    cache.check()


def test_a_partial_load_keeps_its_leading_blocks():
    """Lesson 44: a short copy is a shorter hit, never a failure."""
    cache = make_on_host((1, 2, 3))
    plan = cache.plan_load(cache.match(make_path(1, 2, 3)), limit_blocks=9, now=0.0)
    effect = cache.finish_job(
        JobOutcome(job=plan.job, status=JobStatus.PARTIAL, num_blocks=1), now=0.0
    )

    assert effect is JobEffect.ATTACHED
    assert blocks_by_tier(cache, make_path(1, 2, 3)) == (1, 2, 0)
    assert cache.stats().device.free == 3
    cache.check()


def test_a_failed_job_does_not_poison_the_next():
    """Lesson 24: after a failure the same blocks can be loaded again."""
    cache = make_on_host()
    first = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    assert (
        cache.finish_job(JobOutcome(job=first.job, status=JobStatus.FAILED), now=0.0)
        is JobEffect.NOTHING
    )

    again = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    assert again.job != first.job
    assert cache.finish_job(done(again), now=0.0) is JobEffect.ATTACHED


def test_one_load_serves_everyone():
    """Lesson 26: a second request for the same prefix waits for the same job."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    second = cache.match(make_path(1, 2, 7))

    assert second.loading is plan
    assert cache.plan_load(second, limit_blocks=9, now=0.0) is None


def test_computing_overtakes_a_load():
    """If a sequence computes the blocks meanwhile, its blocks are used and the load's slots are
    returned."""
    cache = make_on_host()
    path = make_path(1, 2)
    plan = cache.plan_load(cache.match(path), limit_blocks=9, now=0.0)
    lease, held = begin(cache, path)
    assert len(cache.commit(lease, path, held, now=0.0)) == 0

    assert cache.finish_job(done(plan), now=0.0) is JobEffect.NOTHING
    assert cache.stats().device.cached == 2
    assert cache.stats().device.free == 2
    cache.check()


def test_a_load_without_room_changes_nothing():
    """Lessons 23, 38: without room the load is a miss, not a wait, and leaves nothing
    behind."""
    cache = make_on_host()
    cache.take(3, now=0.0)
    before = cache.stats()

    assert cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0) is None
    assert cache.stats() == before
    cache.check()


def test_slots_of_a_timed_out_job_wait_until_it_is_quiet():
    """Lesson 50: a late write never reaches a slot that is in use again."""
    cache = make_on_host()
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    late = JobOutcome(job=plan.job, status=JobStatus.TIMED_OUT)

    assert cache.finish_job(late, now=0.0) is JobEffect.QUARANTINED
    assert cache.finish_job(late, now=0.0) is JobEffect.UNKNOWN
    assert cache.stats().device.quarantined == 2
    assert cache.take(3, now=0.0) is None
    assert cache.match(make_path(1, 2)).loading is None
    assert cache.finish_job(done(plan), now=0.0) is JobEffect.NOTHING
    assert cache.stats().device.quarantined == 0
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)
    assert cache.finish_job(done(plan), now=0.0) is JobEffect.UNKNOWN
    assert cache.stats().late_outcomes == 2
    cache.check()


def test_a_path_whose_load_timed_out_is_not_the_next_victim():
    """A request has just asked for the path, so another path that was used before is evicted
    first."""
    cache = make_on_host()
    cache.finish_job(
        done(cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=1, now=0.0)), now=0.0
    )
    serve(cache, make_path(9))
    write_down(cache)
    plan = cache.plan_load(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    assert plan.num_blocks == 1

    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.TIMED_OUT), now=0.0)
    assert cache.take(2, now=0.0) is not None

    assert blocks_by_tier(cache, make_path(1, 2)) == (1, 1, 0)
    assert blocks_by_tier(cache, make_path(9)) == (0, 1, 0)


def test_a_timed_out_write_to_storage_keeps_its_source():
    """Lesson 50: until the executor of the write is quiet, the source bytes stay unchanged;
    otherwise another block would be stored under the key."""
    cache = make_on_host(storage=True)
    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)
    assert plan.target is Tier.STORAGE

    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.TIMED_OUT), now=0.0)
    assert cache._evictor.evict_host(8) == 0
    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)
    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.QUIET), now=0.0)

    assert cache._evictor.evict_host(8) == 2
    cache.check()


def test_storage_is_read_through_the_host():
    """A block in storage is first read to the host and then loaded to the device."""
    cache = make_cache(4, host_blocks=4, storage=True)
    path = make_path(1, 2, 3)
    cache.learn_stored(path, 2, now=0.0)
    assert blocks_by_tier(cache, path) == (0, 0, 2)

    fetch = cache.plan_load(cache.match(path), limit_blocks=9, now=0.0)
    assert fetch.keys == tuple(cache.keys(path, 2))
    cache.finish_job(done(fetch), now=0.0)
    assert blocks_by_tier(cache, path) == (0, 2, 0)
    load = cache.plan_load(cache.match(path), limit_blocks=9, now=0.0)
    cache.finish_job(done(load), now=0.0)
    assert blocks_by_tier(cache, path) == (2, 0, 0)
    cache.check()


def test_a_damaged_block_is_not_asked_for_again():
    """Lesson 44: blocks before the damaged one are used, and the miss has a reason."""
    cache = make_cache(4, host_blocks=4, storage=True)
    path = make_path(1, 2, 3)
    cache.learn_stored(path, 3, now=0.0)
    fetch = cache.plan_load(cache.match(path), limit_blocks=9, now=0.0)
    cache.finish_job(JobOutcome(job=fetch.job, status=JobStatus.DAMAGED, num_blocks=1), now=0.0)

    match = cache.match(path)

    assert blocks_by_tier(cache, path) == (0, 1, 0)
    assert match.reason is MissReason.DAMAGED
    cache.check()


def test_storage_knowledge_is_bounded():
    """Nodes that only storage has are forgotten oldest first; they can be looked up again."""
    cache = make_cache(4, host_blocks=4, storage=True, max_stored_nodes=3)
    for leaf in range(10):
        cache.learn_stored(make_path(leaf, leaf), 2, now=0.0)

    assert cache.stats().nodes == 3
    assert blocks_by_tier(cache, make_path(9, 9)) == (0, 0, 2)
    assert cache.match(make_path(0, 0)).reason is MissReason.EVICTED_STORAGE
    cache.check()


def test_no_orphans_below_a_block_that_is_gone():
    """A host block whose parent left every tier is evicted in the same batch."""
    cache = make_cache(4, host_blocks=8, write_policy=WritePolicy.NONE)
    serve(cache, make_path(1, 2, 9))
    child = make_path(1, 2, 3)
    lease, held = begin(cache, child)
    cache.commit(lease, child, held, now=0.0)
    cache._writes.add(lease.node)
    cache.release(lease, now=0.0)
    write_down(cache)
    assert cache.stats().host.cached == 1

    cache.take(4, now=0.0)

    assert cache.stats().nodes == 0
    assert cache.stats().host.free == 8
    cache.check()


def test_a_block_is_not_attached_below_a_parent_that_left_the_device():
    """The block could never be found there, because a match walks from the root."""
    cache = make_on_host()
    serve(cache, make_path(1, 3))
    write_down(cache)
    cache.free(cache.take(4, now=0.0))
    below = [node for node in cache._tree.nodes() if node.start == 1]
    assert len(below) == 2

    slots = cache.take(1, now=0.0)
    assert not cache._residency.attach(below[0], Tier.DEVICE, 0, 1, slots)

    cache.free(slots)
    cache.check()


def make_two_to_write(**settings):
    """A cache with two paths that are queued to be written to the host, and the one job for
    them."""
    cache = make_cache(host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH, **settings)
    serve(cache, make_path(1, 2))
    serve(cache, make_path(3, 4))
    (plan,) = cache.plan_offloads(limit_blocks=99, now=0.0)
    return cache, plan


def test_one_job_writes_several_paths():
    """Lesson 1: a batch is one operation. All paths are pinned until the job ends."""
    cache, plan = make_two_to_write()
    cache.check()

    assert plan.num_blocks == 4
    assert cache.num_available == 4
    assert cache.plan_offloads(limit_blocks=99, now=0.0) == []
    assert cache.finish_job(done(plan), now=0.0) is JobEffect.ATTACHED
    assert (cache.stats().host.cached, cache.num_available) == (4, 8)
    cache.check()


def test_a_partial_write_of_several_paths_keeps_its_leading_blocks():
    """The first path is on the host, and so is the first block of the second path; the other
    slot is free."""
    cache, plan = make_two_to_write()

    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.PARTIAL, num_blocks=3), now=0.0)
    cache.check()
    cache.trim(0)

    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 2, 0)
    assert blocks_by_tier(cache, make_path(3, 4)) == (0, 1, 0)
    assert cache.stats().host.free == 5


def test_a_reset_during_a_write_of_several_paths_frees_its_slots():
    """The blocks that arrive belong to no node any more."""
    cache, plan = make_two_to_write()
    cache.reset()

    assert cache.finish_job(done(plan), now=0.0) is JobEffect.NOTHING
    assert cache.stats().host.free == 8
    cache.check()


def test_a_timed_out_write_of_several_paths_releases_all_of_them():
    """Lesson 50: only the target slots stay unused until the executor is quiet."""
    cache, plan = make_two_to_write()

    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.TIMED_OUT), now=0.0)
    assert (cache.num_available, cache.stats().host.quarantined) == (8, 4)
    cache.check()
    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.QUIET), now=0.0)

    assert cache.stats().host.free == 8
    cache.check()


def test_a_lookup_that_tells_nothing_new_leaves_a_match_current():
    """Most lookups find nothing new; matching a long prompt again would take longer than the
    lookup."""
    cache = make_on_host(storage=True)
    path = make_path(1, 2, 3)
    answers = []
    for _ in range(2):
        match = cache.match(path)
        lookup = cache.plan_lookup([(path, 2)])
        outcome = JobOutcome(job=lookup.job, status=JobStatus.DONE, found=(2,))
        cache.finish_job(outcome, now=0.0)
        answers.append(cache.is_current(match))

    assert answers == [False, True]
