"""A host tier that outlives its engine: the next engine finds complete blocks, and nothing
else."""

import os
import random

import numpy as np
import pytest

from headwater.cache import KeyScheme, Namespace
from headwater.clock import VirtualClock
from headwater.launch.kept_host import build_runs
from headwater.scheduler.request import Request, SamplingParams
from headwater.testing.tiers import EchoTiers, uncached_tokens
from headwater.transfer.slot_directory import DirectoryShape, SlotDirectory, SlotRecord
from headwater.types import RequestId, WritePolicy

BLOCK = 4
SYSTEM = list(range(100, 112))


def make_engine(kept, policy=WritePolicy.AUTO):
    return EchoTiers(
        kept=kept,
        num_blocks=16,
        host_blocks=40,
        clock=VirtualClock(),
        held=True,
        threads=False,
        write_policy=policy,
    )


def make_request(name, number, salt=""):
    """A prompt of one of a few conversations with the same beginning."""
    rng = random.Random(number)
    tokens = SYSTEM + [rng.randrange(1000) for _ in range(4 + number % 17)]
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=6, ignore_eos=True),
        arrival_s=0.0,
        cache_salt=salt,
    )


def run_to_end(engine, names, finish=lambda: True):
    """Run the loop until these requests have ended; `finish` decides which copies end."""
    while any(name not in engine.reasons for name in names):
        for job in list(engine.copier.pending):
            if finish():
                engine.copier.finish(job)
        engine.step()
        engine.clock.advance(0.01)


TRUTH = [uncached_tokens(make_request("r", number)) for number in range(24)]
"""The output without tiers or earlier requests."""


def serve_requests(engine, rng, name):
    """A few requests at the same time; some copies do not end. The tokens must be the expected
    ones."""
    numbers = [rng.randrange(24) for _ in range(4)]
    names = [f"{name}-{place}" for place in range(4)]
    for request, number in zip(names, numbers, strict=True):
        engine.core.add(make_request(request, number, salt="tenant" if number % 5 == 0 else ""))
    run_to_end(engine, names, finish=lambda: rng.random() < 0.5)
    for request, number in zip(names, numbers, strict=True):
        assert engine.outputs[request] == TRUTH[number], (request, number)


def kill(engine, rng):
    """Leave the targets of each copy in flight as a killed engine may: with all bytes, garbage,
    or nothing."""
    for job in list(engine.copier.pending):
        chance = rng.random()
        if chance < 0.4:
            engine.copier.scribble(job)
        elif chance < 0.7:
            engine.copier.arrive(job)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("policy", [WritePolicy.AUTO, WritePolicy.WRITE_THROUGH])
def test_no_kill_at_any_moment_gives_a_wrong_token(seed, policy, kept):
    """Five engines run one after another over the same memory, and each dies in the middle."""
    rng = random.Random(seed)
    for life in range(5):
        engine = make_engine(kept, policy)
        engine.core.check()
        for turn in range(rng.randrange(1, 6)):
            serve_requests(engine, rng, f"{life}-{turn}")
            engine.core.check()
        last = make_request("last", rng.randrange(24))
        engine.core.add(last)
        for _ in range(rng.randrange(6)):
            for job in list(engine.copier.pending):
                if rng.random() < 0.3:
                    engine.copier.finish(job)
            engine.step()
            engine.clock.advance(0.01)
        kill(engine, rng)


def fill(kept):
    """An engine whose host tier has blocks of several conversations, and no copy in flight."""
    engine = make_engine(kept, WritePolicy.WRITE_THROUGH)
    for number in range(8):
        engine.core.add(make_request(f"r{number}", number))
        run_to_end(engine, [f"r{number}"])
    while engine.copier.pending:
        for job in list(engine.copier.pending):
            engine.copier.finish(job)
        engine.step()
    return engine


def test_the_next_engine_finds_every_block(kept):
    """All host blocks are found again, and are loaded instead of computed."""
    before = fill(kept).cache.stats().host.cached
    engine = make_engine(kept)
    assert before > 20
    assert engine.cache.stats().host.cached >= before
    engine.core.add(make_request("again", 7))
    run_to_end(engine, ["again"])
    assert engine.outputs["again"] == TRUTH[7]
    assert engine.usages["again"].by_tier["host"] >= 12


def test_a_reset_is_remembered_over_a_restart(kept):
    """What an operator removed is not found again, with any salt."""
    engine = fill(kept)
    engine.core.reset_cache(frozenset({"host"}))
    engine.core.publish()
    assert make_engine(kept).cache.stats().host.cached == 0


def test_another_model_adopts_nothing_and_frees_the_memory(kept):
    """Identity and block size are compared before anything is read."""
    fill(kept)
    block_bytes = 2 * 4 * BLOCK
    identity = KeyScheme(block_tokens=BLOCK).root(Namespace())
    assert kept.num_blocks(identity, block_bytes) == 40
    other = KeyScheme(block_tokens=BLOCK, fingerprint=b"other").root(Namespace())
    assert kept.num_blocks(other, block_bytes) is None
    assert kept.num_blocks(identity, block_bytes) is None


def test_a_record_with_a_wrong_key_is_not_adopted():
    """Blocks after a wrong record are not adopted either, nor blocks after one that was only on
    the device."""
    scheme = KeyScheme(block_tokens=1)
    root = scheme.root(Namespace())
    tokens = [number.to_bytes(4, "little") for number in range(5)]
    keys = scheme.chain(root, b"".join(tokens), None)
    chain = [
        SlotRecord(slot, key, parent, token, "", 0.0)
        for slot, (key, parent, token) in enumerate(
            zip(keys, [root, *keys[:-1]], tokens, strict=True)
        )
    ]
    assert [run.slots.tolist() for run in build_runs(chain, scheme)] == [[0, 1, 2, 3, 4]]
    forged = chain[3]._replace(tokens=b"\1\1\1\1")
    assert [r.slots.tolist() for r in build_runs([*chain[:3], forged, chain[4]], scheme)] == [
        [0, 1, 2]
    ]
    assert [r.slots.tolist() for r in build_runs([*chain[:1], *chain[2:]], scheme)] == [[0]]
    assert build_runs(chain, KeyScheme(block_tokens=1, fingerprint=b"x")) == []


def test_a_directory_of_another_shape_is_made_empty():
    """A directory of another model size or format is emptied, and so is a damaged one."""
    file = os.memfd_create("slots")
    try:
        shape = DirectoryShape(identity=bytes(32), num_slots=4, block_bytes=64)
        SlotDirectory(file, shape, BLOCK)._records["is_whole"][2] = 1
        assert len(list(SlotDirectory(file, shape, BLOCK).records())) == 1
        assert not list(SlotDirectory(file, shape._replace(num_slots=5), BLOCK).records())
        os.pwrite(file, b"damaged", 0)
        assert not list(SlotDirectory(file, shape, BLOCK).records())
    finally:
        os.close(file)
