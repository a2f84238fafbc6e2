"""Device and host hold what one pool of their joint size would hold: the policy `auto`."""

import pytest

from headwater.cache import CacheConfig, FinishedRequest, JobOutcome, JobStatus
from headwater.cache.pool import SlotState
from headwater.errors import ConfigError
from headwater.types import EMPTY, Tier, WritePolicy
from tests.cache.make import (
    begin,
    blocks_by_tier,
    done,
    make_cache,
    make_path,
    serve,
    write_down,
)


def make_auto(device_blocks=4, host_blocks=4, **settings):
    return make_cache(
        device_blocks, host_blocks=host_blocks, write_policy=WritePolicy.AUTO, **settings
    )


def finish(cache, path):
    """A whole request, ended as the scheduler ends it."""
    lease, held = begin(cache, path)
    surplus = cache.commit(lease, path, held, now=0.0)
    finished = FinishedRequest(prompt_tokens=len(path.tokens), output_tokens=0)
    cache.release(lease, now=0.0, slots=surplus, finished=finished)
    cache.check()


def load(cache, path):
    """Load a path from the host, with success."""
    plan = cache.plan_load(cache.match(path), limit_blocks=99, now=0.0)
    assert plan is not None
    cache.finish_job(done(plan), now=0.0)
    cache.check()


def test_auto_is_the_default_policy():
    """Lesson 73: a host tier is filled without any flag."""
    assert CacheConfig(device_blocks=8, host_blocks=8).write_policy is WritePolicy.AUTO


def test_a_block_reaches_the_host_before_the_device_evicts_it_without_a_hit():
    """A block that was used once is found on the host after the device needed its slot."""
    cache = make_auto()

    for number in (1, 2, 3, 4, 5, 6):
        finish(cache, make_path(number))
        write_down(cache)

    assert [blocks_by_tier(cache, make_path(n))[:2] for n in (1, 2)] == [(0, 1), (0, 1)]


def test_device_and_host_hold_different_blocks_when_both_are_full():
    """Lesson 87: eight requests of one block fill four device and four host slots, and no block
    is lost."""
    cache = make_auto(write_ahead_blocks=1)

    for number in range(8):
        finish(cache, make_path(number + 1))
        write_down(cache)

    found = [sum(blocks_by_tier(cache, make_path(number + 1))) for number in range(8)]
    assert found.count(1) >= 7  # one slot of the host is kept for the next victim


def test_a_next_victim_whose_write_failed_is_not_written_again_before_it_is_used():
    """A broken host tier does not keep the loop busy with the same write."""
    cache = make_cache(
        3, host_blocks=4, write_policy=WritePolicy.WRITE_BACK, write_ahead_blocks=2
    )
    serve(cache, make_path(1))
    serve(cache, make_path(2))
    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)
    cache.finish_job(JobOutcome(job=plan.job, status=JobStatus.FAILED), now=0.0)

    serve(cache, make_path(3))  # the window moves on, and the first victim is still inside
    (other,) = cache.plan_offloads(limit_blocks=9, now=0.0)
    assert not set(other.source_slots.tolist()) & set(plan.source_slots.tolist())


def test_a_committed_block_fills_a_free_host_slot_but_evicts_nothing():
    """While the host has free slots a block is written at once; a full host is not changed."""
    cache = make_auto(device_blocks=8, host_blocks=1, write_ahead_blocks=1)

    serve(cache, make_path(1))
    write_down(cache)
    serve(cache, make_path(2))

    assert cache.plan_offloads(limit_blocks=9, now=0.0) == []
    assert cache.pool_stats(Tier.HOST).cached == 1


def test_a_loaded_block_leaves_a_full_host_first():
    """After a load the host copy is a duplicate: it is evicted before older blocks without
    another copy."""
    cache = make_auto(device_blocks=4, host_blocks=3, write_ahead_blocks=1)
    for number in (1, 2, 3):
        finish(cache, make_path(number))
        write_down(cache)
    cache.free(cache.take(4, now=0.0))  # the device is empty now
    lease, held = begin_loaded(cache, make_path(3))

    finish(cache, make_path(4))
    cache.save(cache.lease(cache.match(make_path(4)), owner="s", now=0.0))
    write_down(cache)

    assert blocks_by_tier(cache, make_path(1)) == (0, 1, 0)
    assert blocks_by_tier(cache, make_path(2)) == (0, 1, 0)
    assert blocks_by_tier(cache, make_path(3)) == (1, 0, 0)
    cache.release(lease, now=0.0, slots=held)
    cache.check()


def begin_loaded(cache, path):
    load(cache, path)
    lease = cache.lease(cache.match(path), owner="r", now=0.0)
    return lease, EMPTY


def test_a_dropped_duplicate_is_written_again_before_the_device_evicts_it():
    """A dropped duplicate is not lost: when the block becomes a next victim, it is written
    again."""
    cache = make_auto(device_blocks=2, host_blocks=2, write_ahead_blocks=2)
    finish(cache, make_path(1))
    write_down(cache)
    assert cache.trim_host() == 1
    assert blocks_by_tier(cache, make_path(1)) == (1, 0, 0)

    finish(cache, make_path(1))  # used again
    finish(cache, make_path(2))
    write_down(cache)
    cache.free(cache.take(2, now=0.0))

    assert blocks_by_tier(cache, make_path(1)) == (0, 1, 0)


def test_a_path_is_written_from_its_root_side():
    """With room for one block the first block of a path is written: the others need it."""
    cache = make_auto(device_blocks=4, host_blocks=1, write_ahead_blocks=4)
    finish(cache, make_path(1))
    finish(cache, make_path(1, 2))

    write_down(cache)
    cache.free(cache.take(4, now=0.0))

    assert blocks_by_tier(cache, make_path(1, 2)) == (0, 1, 0)


@pytest.mark.parametrize("blocks", [0, -1])
def test_an_empty_eviction_window_is_refused(blocks):
    """The message names the setting and the value."""
    with pytest.raises(ConfigError, match=f"write_ahead_blocks must be positive, got {blocks}"):
        CacheConfig(device_blocks=8, host_blocks=8, write_ahead_blocks=blocks)


def test_a_large_admission_evicts_blocks_with_a_host_copy_first():
    """More is evicted at once than was written ahead. Blocks with a host copy leave the device
    first, although they were used later, and the unwritten block is still found."""
    cache = make_cache(8, host_blocks=8, write_policy=WritePolicy.AUTO, write_ahead_blocks=4)
    serve(cache, make_path(1))
    for node in list(cache._writes.queued(Tier.DEVICE)):
        cache._writes.drop(node)
    serve(cache, make_path(2, 3, 4))
    write_down(cache)
    assert cache.match(make_path(1)).host_blocks == 0

    cache.free(cache.take(7, now=0.0))

    assert blocks_by_tier(cache, make_path(1)) == (1, 0, 0)
    assert blocks_by_tier(cache, make_path(2, 3, 4)) == (0, 3, 0)


def test_a_few_committed_blocks_wait_for_the_end_of_their_request():
    """Free host slots are filled by jobs of many blocks, not by one job per block of output; a
    lease keeps the blocks on the device meanwhile."""
    cache = make_auto(device_blocks=64, host_blocks=64)
    path = make_path(*range(1, 18))
    lease, held = begin(cache, path)

    cache.commit(lease, make_path(*range(1, 16)), held[:15], now=0.0)
    assert cache.plan_offloads(limit_blocks=99, now=0.0) == []
    cache.commit(lease, make_path(*range(1, 17)), held[15:16], now=0.0)
    (plan,) = cache.plan_offloads(limit_blocks=99, now=0.0)
    cache.finish_job(done(plan), now=0.0)
    cache.commit(lease, path, held[16:], now=0.0)
    assert cache.plan_offloads(limit_blocks=99, now=0.0) == []
    cache.release(lease, now=0.0)
    (last,) = cache.plan_offloads(limit_blocks=99, now=0.0)

    assert (plan.num_blocks, last.num_blocks) == (16, 1)
    cache.finish_job(done(last), now=0.0)
    cache.check()


def test_a_queued_node_that_is_also_a_next_victim_is_written_once():
    """One job writes as much of the node as the host has free slots for; the rest is written
    when that job has ended."""
    cache = make_auto(device_blocks=4, host_blocks=4, write_ahead_blocks=4)
    finish(cache, make_path(7, 8, 9))
    write_down(cache)
    cache.free(cache.take(4, now=0.0))  # three blocks are on the host only
    finish(cache, make_path(1, 2))

    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)

    assert (plan.num_blocks, cache.num_jobs) == (1, 1)


def test_victims_of_one_job_are_evicted_in_their_old_order():
    """When the job has ended, its blocks are evicted in the order that they had before the
    write."""
    cache = make_auto(device_blocks=4, host_blocks=8, write_ahead_blocks=4)
    host = cache._host.pool.take(8)  # no free slot: blocks are written as next victims
    for number in (1, 2, 3, 4):
        finish(cache, make_path(number))
    cache._host.pool.free(host, SlotState.HELD)
    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)
    cache.finish_job(done(plan), now=0.0)

    order = [node.tokens[0] for node in cache._device.order.victims()]
    assert (plan.num_blocks, order) == (4, [1, 2, 3, 4])
    cache.check()


def test_a_burst_of_admissions_is_remembered_for_a_while():
    """While bursts of admissions as large as the last one would evict everything, requests that
    end are written at once."""
    cache = make_auto(device_blocks=64, host_blocks=64)
    window = cache._writes.window
    assert not window.has_everything

    slots = cache.take(34, now=0.0)
    assert cache.may_offload()  # every evictable block is searched for, and there is none
    assert cache.plan_offloads(limit_blocks=9, now=0.0) == []
    in_burst = window.has_everything
    cache.free(slots)
    for _ in range(400):
        assert not cache.may_offload()
        slots = cache.take(1, now=0.0)
        assert not cache.may_offload()
        cache.free(slots)

    assert in_burst
    assert not window.has_everything


def test_a_request_that_ends_under_pressure_is_written_at_once():
    """The admissions of one step took more than half of the device: a request that has just ended
    is evicted next."""
    cache = make_auto(device_blocks=16, host_blocks=4)
    for number in range(4):
        finish(cache, make_path(100 + number))
        write_down(cache)  # the host is full
    assert cache.take(9, now=0.0) is not None
    assert cache.may_offload()  # the step is measured
    write_down(cache)

    finish(cache, make_path(1, 2))

    assert cache.plan_offloads(limit_blocks=9, now=0.0)[0].num_blocks == 2


def test_a_request_that_ends_is_written_although_most_blocks_are_evictable():
    """Few requests run, but the admissions of one step may evict more than half of the device,
    so all that ended in the same step is written at once."""
    cache = make_auto(device_blocks=16, host_blocks=4)
    for number in range(4):
        finish(cache, make_path(100 + number))
        write_down(cache)  # the host is full
    slots = cache.take(9, now=0.0)
    assert cache.may_offload()  # the step is measured
    cache.free(slots)
    write_down(cache)

    finish(cache, make_path(1, 2))
    finish(cache, make_path(3, 4))
    plans = cache.plan_offloads(limit_blocks=9, now=0.0)

    assert sum(plan.num_blocks for plan in plans) == 4


def test_a_load_does_not_refresh_blocks_that_were_not_asked_for():
    """A request that branches off loads the shared blocks. The rest of the old path keeps its place
    in the host order and is evicted first."""
    cache = make_auto(device_blocks=8, host_blocks=5, write_ahead_blocks=8)
    finish(cache, make_path(1, 2, 3))
    write_down(cache)
    finish(cache, make_path(7, 8))
    write_down(cache)
    cache.free(cache.take(8, now=0.0))  # the device is empty now, the host is full
    load(cache, make_path(1, 9))

    finish(cache, make_path(20))
    write_down(cache)

    assert sum(blocks_by_tier(cache, make_path(7, 8))) == 2
    assert sum(blocks_by_tier(cache, make_path(1, 2, 3))) == 2


def test_the_window_holds_what_the_next_admissions_need():
    """Blocks of waiting requests are known before they are admitted, so their victims are written."""
    cache = make_auto(device_blocks=16, host_blocks=16, write_ahead_blocks=1)
    window = cache._writes.window

    cache.may_offload(num_expected=5)
    assert window.num_blocks == 5
    cache.may_offload(num_expected=99)
    assert window.has_everything
    cache.may_offload(num_expected=0)
    assert window.num_blocks == 1


def test_a_duplicate_above_host_blocks_leaves_the_host_last_of_the_duplicates():
    """A pinned path is a duplicate on the host. Its end leaves first, then its beginning, and only
    then blocks without another copy."""
    cache = make_auto(device_blocks=8, host_blocks=3, write_ahead_blocks=8)
    finish(cache, make_path(1))
    write_down(cache)
    finish(cache, make_path(1, 2))
    write_down(cache)
    finish(cache, make_path(5))
    write_down(cache)
    lease = cache.lease(cache.match(make_path(1, 2)), owner="r", now=0.0)

    finish(cache, make_path(6))
    write_down(cache)
    finish(cache, make_path(7))
    write_down(cache)

    host = [cache.match(make_path(n)).nodes[0].host for n in (5, 6, 7)]
    assert [len(slots) for slots in host] == [1, 1, 1]
    cache.release(lease, now=0.0)
    cache.check()


def test_a_block_that_is_used_during_its_write_is_not_evicted_first():
    """A block was the next victim when its write began. A request used it meanwhile, so other
    blocks are evicted before it."""
    cache = make_cache(
        3, host_blocks=8, write_policy=WritePolicy.WRITE_BACK, write_ahead_blocks=1
    )
    for number in (1, 2, 3):
        serve(cache, make_path(number))
    (plan,) = cache.plan_offloads(limit_blocks=9, now=0.0)

    serve(cache, make_path(1))
    cache.finish_job(done(plan), now=0.0)
    slots = cache.take(1, now=0.0)

    assert slots is not None
    assert blocks_by_tier(cache, make_path(1))[0] == 1
    assert blocks_by_tier(cache, make_path(2))[0] == 0
    cache.free(slots)
    cache.check()
