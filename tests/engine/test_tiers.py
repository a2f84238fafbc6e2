"""Writes to lower tiers and hits on them, in a whole engine.

The runner's KV, the host slab and the stored blocks are real bytes, so a block that is copied
or reused wrongly gives other tokens.
"""

import pytest

from headwater.cache import LoadJob, TokenPath
from headwater.scheduler.request import Request
from headwater.types import WritePolicy
from tests.engine.tier_harness import (
    PROMPT,
    always,
    make_faulty,
    make_through,
)
from tests.scheduler.harness import (
    Harness,
    expected_tokens,
    make_prompt,
    make_request,
    make_storage,
)

POLICIES = list(WritePolicy)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_host_hits_equal_recomputing(depth: int, policy: WritePolicy) -> None:
    """For each write policy: prompts that the device evicted give the same tokens, from the
    host if the policy wrote them there."""
    harness = Harness(num_blocks=16, host_blocks=64, depth=depth, write_policy=policy)
    prompts = [make_prompt(33, family=family) for family in range(4)]

    for turn in range(4):
        for family, prompt in enumerate(prompts):
            for again in range(2):
                harness.run(make_request(f"{turn}-{family}-{again}", prompt, max_tokens=3))

    for name, tokens in harness.outputs.items():
        family = int(name.split("-")[1])
        alone = make_request("alone", prompts[family], max_tokens=3)
        assert tokens == expected_tokens(alone)
    from_host = sum(usage.by_tier["host"] for usage in harness.usages.values())
    assert (from_host > 0) == (policy is not WritePolicy.NONE)
    assert harness.core.stats().found_tokens["host"] == from_host
    harness.check_empty()


def test_a_broken_tier_does_not_keep_the_loop_busy() -> None:
    """Lesson 24: a failed write is not retried at once: the engine becomes idle."""
    storage = make_faulty(always)
    harness = make_through(storage)

    harness.run(make_request("a", PROMPT, max_tokens=1), max_steps=50)

    failures = harness.core.stats().links["host_to_storage"].failures
    assert failures["error"] >= 1
    assert not harness.core.has_work


def test_preemption_saves_and_resumes_from_the_host() -> None:
    """Lessons 29, 30, 37: blocks of a victim are hit when it resumes; the request is
    unchanged."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    prompts = [request.tokens.copy() for request in requests]
    harness = Harness(num_blocks=20, host_blocks=100, write_policy=WritePolicy.NONE)

    harness.run(*requests)

    assert harness.scheduler.stats().num_preemptions > 0
    assert any(isinstance(plan, LoadJob) for plan in harness.copier.started)
    for request, prompt in zip(requests, prompts, strict=True):
        assert harness.outputs[request.request_id] == expected_tokens(request)
        assert (request.tokens == prompt).all()
    harness.check_empty()


def test_preemption_saves_to_storage_too() -> None:
    """Lesson 29: prompt and output of a victim are saved, whatever the write policy: another
    engine finds more there than the prompts. With saving turned off, nothing is written."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    written = {}
    for saves in (True, False):
        storage = make_storage()
        harness = make_through(
            storage,
            num_blocks=20,
            host_blocks=100,
            write_policy=WritePolicy.NONE,
            settings={"save_preempted": saves},
        )
        harness.run(*requests)
        assert harness.scheduler.stats().num_preemptions > 0
        written[saves] = storage.stats().blocks_written
        if saves:
            longest = max(
                storage.contains([harness.cache.keys(whole_path(harness, r), 12)], timeout_s=1)[
                    0
                ]
                for r in requests
            )

    assert written[True] > 0
    assert longest > 2, "no block with generated tokens was saved"
    assert written[False] == 0


def whole_path(harness: Harness, request: Request) -> TokenPath:
    """Prompt and output of a request that has ended."""
    return TokenPath(request.tokens.tolist() + harness.outputs[request.request_id])


def test_two_tenants_share_nothing_in_storage() -> None:
    """Lesson 67: another salt is another key, below the process too."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, cache_salt="x"))
    harness = make_through(storage)

    harness.run(make_request("b", PROMPT, cache_salt="y"))

    assert harness.usages["b"].cached_tokens == 0
    assert harness.usages["b"].miss_reason == "never_seen"


def test_without_a_host_tier_nothing_is_copied() -> None:
    """Lesson 28: a capacity of 0 is no tier, and no special case."""
    harness = Harness(num_blocks=16)

    harness.run(*(make_request(f"r{n}", make_prompt(30, family=n)) for n in range(4)))

    assert harness.copier.started == []
    assert harness.core.stats().links == {}


def test_a_drain_ends_what_is_being_written_and_is_bounded() -> None:
    """Lesson 59: writes in flight end first; a write that hangs is waited for only for a
    bounded time."""
    harness = Harness(
        num_blocks=64, host_blocks=64, write_policy=WritePolicy.WRITE_THROUGH, held=True
    )
    harness.add(make_request("a", PROMPT, max_tokens=1))
    while "a" not in harness.reasons:
        harness.step()
    assert harness.cache.stats().host.cached == 0

    harness.core.drain(0.0)
    assert harness.scheduler.num_copies > 0
    harness.core.step()
    for job in list(harness.copier.pending):
        harness.copier.finish(job)
    harness.core.drain(1.0)

    assert harness.scheduler.num_copies == 0
    assert harness.cache.stats().host.cached == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_blocks", [1, 2, 5])
def test_writes_to_a_host_tier_that_is_too_small_come_to_an_end(
    policy: WritePolicy, host_blocks: int
) -> None:
    """Lesson 19: blocks that evict each other are written once per use; then the loop
    sleeps."""
    harness = Harness(num_blocks=16, host_blocks=host_blocks, write_policy=policy)

    for family in range(4):
        for again in range(2):
            prompt = make_prompt(30, family=family)
            harness.run(make_request(f"{family}-{again}", prompt, max_tokens=2), max_steps=100)

    assert not harness.core.has_work
    harness.check_empty()
