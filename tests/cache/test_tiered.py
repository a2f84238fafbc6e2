"""TieredCache: what a caller may rely on, one behaviour a test."""

import numpy as np
import pytest

from headwater.cache import (
    CacheConfig,
    Ending,
    Extent,
    InFlight,
    Landing,
    MediaSpan,
    MissReason,
    Namespace,
    Outcome,
    media_by_block,
)
from headwater.errors import CacheUseError, ConfigError, InvariantError, StaleLease
from headwater.types import RequestId, Tier, WritePolicy
from tests.cache.make import BLOCK, begin, extents, make_cache, make_path, serve, write_down

X = RequestId("x")


def done(plan):
    return Outcome(job=plan.job, ending=Ending.DONE)


# -- matching -----------------------------------------------------------------------------


def test_a_match_changes_nothing():
    """Asking is free of effects, whatever is asked."""
    cache = make_cache()
    serve(cache, make_path(1, 2, 3))
    before = cache.stats()

    for path in (make_path(1, 2), make_path(1, 9), make_path(5), make_path()):
        cache.match(path)

    assert cache.stats() == before


def test_a_full_hit_leaves_the_last_token_to_compute():
    """The caller's limit keeps the block of the last token out of the match."""
    cache = make_cache()
    path = make_path(1, 2)
    serve(cache, path)

    match = cache.match(path, (len(path.tokens) - 1) // BLOCK)

    assert match.device_blocks == 1
    assert match.reason is None


def test_extents_are_in_position_order():
    """Lesson 22: whatever tiers the parts are in, and nothing after the first gap counts."""
    cache = make_cache(4, host_blocks=8, storage=True, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, 3))
    write_down(cache)
    write_down(cache)
    cache.free(cache.take(2, now=0.0))
    cache.learn_stored(make_path(1, 2, 3, 4, 5), 5, now=0.0)

    match = cache.match(make_path(1, 2, 3, 4, 5, 6))

    assert match.extents == (
        Extent(Tier.DEVICE, 0, 2),
        Extent(Tier.HOST, 2, 3),
        Extent(Tier.STORAGE, 3, 5),
    )


def test_reasons_for_a_miss():
    """Lesson 63: every miss has a reason."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    lease, _ = begin(cache, make_path(7), "x")
    cache.announce(lease, make_path(7))

    assert cache.match(make_path(1, 2, 3)).reason is None
    assert cache.match(make_path(1, 9)).reason is MissReason.NEVER_SEEN
    assert cache.match(make_path(9)).reason is MissReason.NEVER_SEEN
    assert cache.match(make_path()).reason is MissReason.TOO_SHORT
    assert cache.match(make_path(7)).reason is MissReason.IN_FLIGHT
    cache.take(2, now=0.0)
    assert cache.match(make_path(1, 2, 3)).reason is MissReason.EVICTED_DEVICE
    assert cache.match(make_path(1, 5)).reason is MissReason.NEVER_SEEN


def test_a_reason_tells_nothing_about_another_tenant():
    """Lesson 63: what one tenant had and lost is never seen by the next."""
    cache = make_cache(2)
    mine = make_path(1, 2, namespace=Namespace(salt="a"))
    serve(cache, mine)
    lease, _ = begin(cache, make_path(3, namespace=Namespace(salt="a")), "x")
    cache.announce(lease, make_path(3, namespace=Namespace(salt="a")))

    assert cache.match(mine).reason is MissReason.EVICTED_DEVICE
    for other in (
        make_path(1, 2),
        make_path(1, 2, namespace=Namespace(salt="b")),
        make_path(3),
    ):
        assert cache.match(other).reason is MissReason.NEVER_SEEN


def test_evicted_is_remembered_below_a_node_that_came_back():
    """A block evicted twice over, parent and child, is still known to have been here."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    serve(cache, make_path(1, 5))
    cache.free(cache.take(4, now=0.0))
    serve(cache, make_path(1))

    assert cache.match(make_path(1, 2)).reason is MissReason.EVICTED_DEVICE
    assert cache.match(make_path(1, 6)).reason is MissReason.NEVER_SEEN


def test_ghosts_are_bounded():
    """Metadata of evicted blocks does not grow for ever."""
    cache = make_cache(2, max_ghosts=10)
    for leaf in range(100):
        serve(cache, make_path(leaf, leaf + 1))

    assert 5 <= len(cache.ghosts) <= 10


def test_media_are_compared_in_the_tree():
    """The same placeholder tokens with another image are another block, locally too."""
    cache = make_cache()
    cat = make_path(1, 9, media=media_by_block([MediaSpan(BLOCK, BLOCK + 2, b"cat")], BLOCK))
    dog = make_path(1, 9, media=media_by_block([MediaSpan(BLOCK, BLOCK + 2, b"dog")], BLOCK))
    serve(cache, cat)

    assert extents(cache, cat) == (2, 0, 0)
    assert extents(cache, dog) == (1, 0, 0)
    assert extents(cache, make_path(1, 9)) == (1, 0, 0)


def test_namespaces_share_nothing():
    """Lesson 67: another salt or another adapter finds nothing, on any tier."""
    cache = make_cache(host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2, namespace=Namespace(salt="a")))
    write_down(cache)

    assert extents(cache, make_path(1, 2)) == (0, 0, 0)
    assert extents(cache, make_path(1, 2, namespace=Namespace(adapter="a"))) == (0, 0, 0)
    assert extents(cache, make_path(1, 2, namespace=Namespace(salt="a"))) == (2, 0, 0)


# -- leases and commits -------------------------------------------------------------------


def test_a_block_is_findable_only_after_commit():
    """Lesson 46: held blocks are in flight, and match nothing."""
    cache = make_cache()
    path = make_path(1, 2, 3)
    lease, held = begin(cache, path, "x")
    cache.announce(lease, path)

    before = cache.match(path)
    cache.commit(lease, path, held[:2], now=0.0)
    after = cache.match(path)

    assert (before.num_blocks, before.in_flight) == (0, InFlight(X, 3))
    assert (after.num_blocks, after.in_flight) == (2, InFlight(X, 1))
    cache.release(lease, now=0.0, slots=held[2:])
    assert cache.match(path).in_flight is None


def test_in_flight_says_how_far_it_goes():
    """Only the blocks that both prompts share are being computed for the asker."""
    cache = make_cache()
    lease, _ = begin(cache, make_path(1, 2, 3), "x")
    cache.announce(lease, make_path(1, 2, 3))

    assert cache.match(make_path(1, 2, 9)).in_flight == InFlight(X, 2)
    assert cache.match(make_path(9, 2)).in_flight is None


def test_a_lease_survives_splits():
    """Another prompt that diverges inside a leased run does not disturb the lease."""
    cache = make_cache()
    path = make_path(1, 2, 3, 4)
    serve(cache, path)
    lease = cache.lease(cache.match(path), owner="a", now=0.0)
    serve(cache, make_path(1, 2, 8))
    serve(cache, make_path(1, 9))
    cache.check()

    assert cache.take(5, now=0.0) is None
    assert len(cache.take(4, now=0.0)) == 4
    assert extents(cache, path) == (4, 0, 0)
    cache.release(lease, now=0.0)
    cache.check()


def test_a_stale_match_is_made_again():
    """Lesson 23: a lease never covers blocks that went since the match."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2, 3))
    match = cache.match(make_path(1, 2, 3))
    cache.take(2, now=0.0)

    lease = cache.lease(match, owner="r", now=0.0)

    assert lease.num_blocks == 2
    assert len(lease.slots) == 2
    cache.check()


def test_a_request_that_does_not_fit_rolls_back():
    """Lesson 23: nothing is left behind by an admission that failed half-way."""
    cache = make_cache(4)
    serve(cache, make_path(1, 2))
    before = cache.stats()

    lease = cache.lease(
        cache.match(make_path(1, 2, 3, 4, 5)), owner="r", now=0.0, counted=False
    )
    assert cache.take(3, now=0.0) is None
    cache.release(lease, now=0.0)

    assert cache.stats() == before
    assert extents(cache, make_path(1, 2)) == (2, 0, 0)


def test_decode_grows_one_run():
    """Committing block by block makes one node, not one a block."""
    cache = make_cache(40)
    path = make_path(*range(32))
    lease, held = begin(cache, path)
    for slot in held:
        cache.commit(lease, path, np.array([slot]), now=0.0)
    cache.release(lease, now=0.0)

    assert cache.stats().nodes == 1
    assert extents(cache, path) == (32, 0, 0)


def test_a_released_lease_is_refused():
    """Every use of a lease that is over is a typed error and changes nothing."""
    cache, other = make_cache(), make_cache()
    lease, held = begin(cache, make_path(1))
    cache.release(lease, now=0.0, slots=held)
    foreign, _ = begin(other, make_path(1))
    before = cache.stats()

    for bad in (lease, foreign):
        with pytest.raises(StaleLease):
            cache.release(bad, now=0.0)
        with pytest.raises(StaleLease):
            cache.commit(bad, make_path(1), held, now=0.0)
        with pytest.raises(StaleLease):
            cache.announce(bad, make_path(1))
        with pytest.raises(StaleLease):
            cache.save(bad)
    assert cache.stats() == before


def test_commits_that_cannot_be_are_refused():
    """More blocks than the path has, or of another namespace: an error, and no change."""
    cache = make_cache()
    lease, held = begin(cache, make_path(1, 2))

    with pytest.raises(CacheUseError):
        cache.commit(lease, make_path(1), held, now=0.0)
    with pytest.raises(CacheUseError):
        cache.commit(lease, make_path(1, 2, namespace=Namespace("a")), held, now=0.0)
    with pytest.raises(CacheUseError):
        cache.learn_stored(make_path(1), 2, now=0.0)
    assert cache.stats().device.held == 2
    cache.check()


def test_a_slot_named_twice_is_not_committed():
    """Lesson 7: one slot cannot become two blocks; nothing has changed when it is refused."""
    cache = make_cache(16)
    path = make_path(*range(12))
    lease, held = begin(cache, path)

    for twins in (held[[0, 0]], held[[*range(11), 3]]):
        with pytest.raises(InvariantError, match="twice"):
            cache.commit(lease, path, twins, now=0.0)
    assert cache.stats().device.held == 12
    cache.check()


def test_a_match_of_another_cache_is_made_again():
    """A lease is never on nodes of a foreign tree, even when the versions happen to agree."""
    cache, other = make_cache(), make_cache()
    serve(other, make_path(1, 2))
    serve(cache, make_path(7, 8))

    lease = cache.lease(other.match(make_path(1, 2)), owner="r", now=0.0)

    assert lease.num_blocks == 0
    cache.check()
    other.check()


def test_only_full_blocks_are_committed():
    """Lesson 41: tokens without KV, in a block that is not full, cannot be published."""
    cache = make_cache()
    path = make_path(1, 2)
    path.tokens = path.tokens[:-1]
    lease = cache.lease(cache.match(path), owner="r", now=0.0)
    held = cache.take(2, now=0.0)

    with pytest.raises(CacheUseError):
        cache.commit(lease, path, held, now=0.0)
    cache.commit(lease, path, held[:1], now=0.0)
    assert extents(cache, make_path(1, 2)) == (1, 0, 0)


def test_the_ledger_counts_a_request_once():
    """Lesson 62: probes and resumed sequences are not counted again."""
    cache = make_cache()
    serve(cache, make_path(1, 2))
    cache.match(make_path(1, 2))
    match = cache.match(make_path(1, 2, 3))
    cache.release(cache.lease(match, owner="a", now=0.0), now=0.0)
    cache.release(cache.lease(match, owner="a", now=0.0, counted=False), now=0.0)

    ledger = cache.stats().ledger

    assert ledger.queries == 2
    assert ledger.prompt_tokens == 5 * BLOCK
    assert ledger.found_tokens == ledger.tokens_by_tier[Tier.DEVICE] == 2 * BLOCK
    assert ledger.misses_by_reason == {MissReason.NEVER_SEEN: 2}


# -- transfers ----------------------------------------------------------------------------


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

    assert extents(cache, path) == (0, after_eviction, 0)
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
    """Lesson 40: a block that is there already is not written again."""
    cache = make_cache(host_blocks=8, storage=True, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    write_down(cache)
    assert extents(cache, make_path(1, 2)) == (2, 0, 0)
    assert cache.match(make_path(1, 2)).nodes[0].num_stored == 2
    serve(cache, make_path(1, 2))

    assert cache.demote(limit_blocks=99, now=0.0) == []


def test_saving_writes_whatever_the_policy():
    """Lesson 29: a preempted sequence's blocks are kept, and pinned until they are."""
    cache = make_cache(2, host_blocks=4, write_policy=WritePolicy.NONE)
    path = make_path(1, 2)
    lease, held = begin(cache, path)
    cache.commit(lease, path, held, now=0.0)
    cache.save(lease)
    cache.release(lease, now=0.0)

    (plan,) = cache.demote(limit_blocks=9, now=0.0)
    assert cache.take(1, now=0.0) is None
    cache.land(done(plan), now=0.0)
    assert len(cache.take(2, now=0.0)) == 2
    assert extents(cache, path) == (0, 2, 0)


def make_demoted(blocks=(1, 2), **settings):
    """A cache whose only blocks are on the host."""
    cache = make_cache(4, host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH, **settings)
    serve(cache, make_path(*blocks))
    write_down(cache)
    cache.free(cache.take(4, now=0.0))
    assert extents(cache, make_path(*blocks)) == (0, len(blocks), 0)
    return cache


def test_a_promotion_is_findable_when_it_has_landed():
    """Lesson 20: submitted is not done."""
    cache = make_demoted()
    plan = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    assert (plan.source, plan.target, plan.num_blocks) == (Tier.HOST, Tier.DEVICE, 2)
    assert extents(cache, make_path(1, 2)) == (0, 2, 0)
    assert cache.land(done(plan), now=0.0) is Landing.ATTACHED
    assert extents(cache, make_path(1, 2)) == (2, 0, 0)
    cache.check()


def test_source_and_target_are_pinned_until_the_end():
    """Lesson 21: neither the host copy nor the new slots can be taken by anybody else."""
    cache = make_demoted()
    plan = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    assert cache.evictor.evict_host(8) == 0
    assert cache.take(3, now=0.0) is None
    cache.land(done(plan), now=0.0)
    assert cache.evictor.evict_host(8) == 2
    cache.check()


def test_a_partial_promotion_keeps_its_leading_blocks():
    """Lesson 44: a short copy is a shorter hit, never a failure."""
    cache = make_demoted((1, 2, 3))
    plan = cache.promote(cache.match(make_path(1, 2, 3)), limit_blocks=9, now=0.0)
    landing = cache.land(Outcome(job=plan.job, ending=Ending.PARTIAL, num_blocks=1), now=0.0)

    assert landing is Landing.ATTACHED
    assert extents(cache, make_path(1, 2, 3)) == (1, 2, 0)
    assert cache.stats().device.free == 3
    cache.check()


def test_a_failed_job_does_not_poison_the_next():
    """Lesson 24: after a failure the same blocks can be promoted again."""
    cache = make_demoted()
    first = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    assert cache.land(Outcome(job=first.job, ending=Ending.FAILED), now=0.0) is Landing.NOTHING

    again = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    assert again.job != first.job
    assert cache.land(done(again), now=0.0) is Landing.ATTACHED


def test_one_load_serves_everyone():
    """Lesson 26: a second request for the same prefix waits for the same job."""
    cache = make_demoted()
    plan = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)

    second = cache.match(make_path(1, 2, 7))

    assert second.loading == plan.job
    assert cache.promote(second, limit_blocks=9, now=0.0) is None


def test_computing_overtakes_a_load():
    """A sequence that computed the blocks meanwhile wins; the load's slots go back."""
    cache = make_demoted()
    path = make_path(1, 2)
    plan = cache.promote(cache.match(path), limit_blocks=9, now=0.0)
    lease, held = begin(cache, path)
    assert len(cache.commit(lease, path, held, now=0.0)) == 0

    assert cache.land(done(plan), now=0.0) is Landing.NOTHING
    assert cache.stats().device.cached == 2
    assert cache.stats().device.free == 2
    cache.check()


def test_a_promotion_without_room_changes_nothing():
    """Lessons 23, 38: no room is a miss, not a wait, and leaves nothing behind."""
    cache = make_demoted()
    cache.take(3, now=0.0)
    before = cache.stats()

    assert cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0) is None
    assert cache.stats() == before
    cache.check()


def test_slots_of_a_timed_out_job_wait_until_it_is_quiet():
    """Lesson 50: a late write can never land in a slot that somebody else has."""
    cache = make_demoted()
    plan = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    late = Outcome(job=plan.job, ending=Ending.TIMED_OUT)

    assert cache.land(late, now=0.0) is Landing.QUARANTINED
    assert cache.land(late, now=0.0) is Landing.UNKNOWN
    assert cache.stats().device.quarantined == 2
    assert cache.take(3, now=0.0) is None
    assert cache.match(make_path(1, 2)).loading is None
    assert cache.land(done(plan), now=0.0) is Landing.NOTHING
    assert cache.stats().device.quarantined == 0
    assert extents(cache, make_path(1, 2)) == (0, 2, 0)
    assert cache.land(done(plan), now=0.0) is Landing.UNKNOWN
    assert cache.stats().late_outcomes == 2
    cache.check()


def test_storage_is_read_through_the_host():
    """Known in storage, fetched to the host, then promoted to the device."""
    cache = make_cache(4, host_blocks=4, storage=True)
    path = make_path(1, 2, 3)
    cache.learn_stored(path, 2, now=0.0)
    assert extents(cache, path) == (0, 0, 2)

    fetch = cache.promote(cache.match(path), limit_blocks=9, now=0.0)
    assert fetch.keys == tuple(cache.keys(path, 2))
    cache.land(done(fetch), now=0.0)
    assert extents(cache, path) == (0, 2, 0)
    load = cache.promote(cache.match(path), limit_blocks=9, now=0.0)
    cache.land(done(load), now=0.0)
    assert extents(cache, path) == (2, 0, 0)
    cache.check()


def test_a_damaged_block_is_not_asked_for_again():
    """Lesson 44: what is before it is used, and the miss says why it ended there."""
    cache = make_cache(4, host_blocks=4, storage=True)
    path = make_path(1, 2, 3)
    cache.learn_stored(path, 3, now=0.0)
    fetch = cache.promote(cache.match(path), limit_blocks=9, now=0.0)
    cache.land(Outcome(job=fetch.job, ending=Ending.DAMAGED, num_blocks=1), now=0.0)

    match = cache.match(path)

    assert extents(cache, path) == (0, 1, 0)
    assert match.reason is MissReason.DAMAGED
    cache.check()


def test_storage_knowledge_is_bounded():
    """What only storage has is forgotten oldest first; it can be looked up again."""
    cache = make_cache(4, host_blocks=4, storage=True, max_stored_nodes=3)
    for leaf in range(10):
        cache.learn_stored(make_path(leaf, leaf), 2, now=0.0)

    assert cache.stats().nodes == 3
    assert extents(cache, make_path(9, 9)) == (0, 0, 2)
    assert cache.match(make_path(0, 0)).reason is MissReason.EVICTED_STORAGE
    cache.check()


def test_no_orphans_below_a_block_that_is_gone():
    """A host block whose parent left every tier goes in the same batch."""
    cache = make_cache(4, host_blocks=8, write_policy=WritePolicy.NONE)
    serve(cache, make_path(1, 2, 9))
    child = make_path(1, 2, 3)
    lease, held = begin(cache, child)
    cache.commit(lease, child, held, now=0.0)
    cache._writes.want(lease.node)
    cache.release(lease, now=0.0)
    write_down(cache)
    assert cache.stats().host.cached == 1

    cache.take(4, now=0.0)

    assert cache.stats().nodes == 0
    assert cache.stats().host.free == 8
    cache.check()


# -- reset --------------------------------------------------------------------------------


def test_reset_forgets_and_bumps_the_generation():
    """Everything that nobody holds is free at once."""
    cache = make_cache(host_blocks=4, write_policy=WritePolicy.WRITE_THROUGH)
    serve(cache, make_path(1, 2))
    write_down(cache)
    cache.reset()

    assert extents(cache, make_path(1, 2)) == (0, 0, 0)
    assert cache.match(make_path(1, 2)).reason is MissReason.NEVER_SEEN
    assert cache.stats().device.free == 8
    assert cache.stats().host.free == 4
    assert cache.stats().generation == 1
    cache.check()


def test_reset_under_load():
    """Lesson 59: a running sequence keeps its blocks, publishes nothing, and frees them once."""
    cache = make_cache()
    path = make_path(1, 2, 3)
    serve(cache, make_path(1))
    lease, held = begin(cache, path)
    cache.reset()

    surplus = cache.commit(lease, path, held, now=0.0)
    assert surplus.tolist() == held.tolist()
    assert lease.num_blocks == 3
    cache.announce(lease, make_path(1, 2, 3, 4))
    assert extents(cache, path) == (0, 0, 0)
    cache.check()
    cache.release(lease, now=0.0, slots=surplus)
    assert cache.stats().device.free == 8
    cache.check()


def test_late_results_of_an_older_generation_only_release():
    """Lesson 17: a transfer that lands after a reset attaches nothing."""
    cache = make_demoted()
    plan = cache.promote(cache.match(make_path(1, 2)), limit_blocks=9, now=0.0)
    cache.reset()
    serve(cache, make_path(1, 2))

    assert cache.land(done(plan), now=0.0) is Landing.NOTHING
    assert cache.stats().device.free == 2
    assert cache.stats().host.free == 8
    cache.check()


# -- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"block_tokens": 0},
        {"device_blocks": -1},
        {"host_blocks": -1},
        {"select_hits": 0},
        {"eviction": "fifo"},
        {"storage": True},
        {"write_policy": "write_through"},
    ],
)
def test_impossible_settings_are_refused(settings):
    """Lesson 28 and 61: what cannot work is an error when it is made."""
    with pytest.raises(ConfigError):
        CacheConfig(**{"device_blocks": 4, **settings})


def test_empty_namespaces_are_forgotten():
    """Salts that come once do not pile up."""
    cache = make_cache(4)
    for tenant in range(9_000):
        cache.release(
            cache.lease(
                cache.match(make_path(1, namespace=Namespace(salt=str(tenant)))),
                owner="r",
                now=0.0,
            ),
            now=0.0,
        )

    assert len(cache.tree.roots) <= 4096
