"""Builders for cache tests: a cache, and complete requests."""

import numpy as np

from headwater.cache import CacheConfig, JobOutcome, JobStatus, TieredCache, TokenPath
from headwater.native import block_keys
from headwater.types import WritePolicy

BLOCK = 4


def make_cache(device_blocks=8, **settings):
    settings.setdefault("write_policy", WritePolicy.NONE)
    config = CacheConfig(block_tokens=BLOCK, device_blocks=device_blocks, **settings)
    return TieredCache(config)


def make_stored(device_blocks=16, host_blocks=16, **settings):
    """A cache with all tiers that writes everything through."""
    return make_cache(
        device_blocks,
        host_blocks=host_blocks,
        storage=True,
        write_policy=WritePolicy.WRITE_THROUGH,
        **settings,
    )


def make_path(*blocks, **kwargs):
    """One block for each number: four times that token."""
    return TokenPath(np.repeat(np.array(blocks, dtype=np.int32), BLOCK), **kwargs)


def begin(cache, path, owner="r"):
    """Match, lease and take, so that a sequence can compute; return its lease and its held
    slots."""
    lease = cache.lease(cache.match(path), owner=owner, now=0.0)
    held = cache.take(path.num_blocks(BLOCK) - lease.num_blocks, now=0.0)
    assert held is not None
    return lease, held


def serve(cache, path):
    """A whole request: begin, commit, release."""
    lease, held = begin(cache, path)
    surplus = cache.commit(lease, path, held, now=0.0)
    cache.release(lease, now=0.0, slots=surplus)


def write_down(cache, limit=100):
    """Execute every planned offload successfully."""
    for plan in cache.plan_offloads(limit_blocks=limit, now=0.0):
        cache.finish_job(done(plan), now=0.0)


def blocks_by_tier(cache, path):
    """(device, host, storage) blocks of a match."""
    match = cache.match(path)
    return match.device_blocks, match.host_blocks, match.storage_blocks


def done(plan):
    """The outcome of a successful transfer."""
    return JobOutcome(job=plan.job, status=JobStatus.DONE)


def make_on_host(blocks=(1, 2), **settings):
    """A cache whose only blocks are on the host."""
    cache = make_cache(4, host_blocks=8, write_policy=WritePolicy.WRITE_THROUGH, **settings)
    serve(cache, make_path(*blocks))
    write_down(cache)
    cache.free(cache.take(4, now=0.0))
    assert blocks_by_tier(cache, make_path(*blocks)) == (0, len(blocks), 0)
    return cache


def note_hashing(monkeypatch):
    """Return a list that gets the number of blocks of each later hashing call."""
    counts = []
    real = block_keys.chain

    def counting(parent, tokens, stride):
        counts.append(len(tokens) // stride)
        return real(parent, tokens, stride)

    monkeypatch.setattr(block_keys, "chain", counting)
    return counts
