"""A first chunk that starts with its load: it counts when the load has ended, and is discarded
when the load failed.

The runner reads the copied bytes. A row over a failed load sees garbage, so a token or block of
it that is emitted would be wrong.
"""

from typing import Any

import pytest

from headwater.cache import LoadJob
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request

PROMPT = make_prompt(43)
"""Ten full blocks; the host has the first eight of them."""

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def make_harness(depth: int, **options: Any) -> Harness:
    """The host has eight blocks of PROMPT, the device has none; copies end when told to."""
    harness = Harness(num_blocks=24, host_blocks=64, depth=depth, layerwise=True, **options)
    for number in range(2):
        harness.run(make_request(f"warm{number}", PROMPT[:33], max_tokens=1))
    for family in range(5, 10):
        harness.run(
            make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1)
        )
    harness.copier.held = True
    return harness


def begin(harness: Harness, max_tokens: int = 4) -> LoadJob:
    """Admit a request for PROMPT; return the load with which it overlaps."""
    before = len(harness.copier.started)
    harness.add(make_request("overlaps", PROMPT, max_tokens=max_tokens))
    harness.step()
    (plan,) = [p for p in harness.copier.started[before:] if isinstance(p, LoadJob)]
    return plan


def right(prompt: list[int] = PROMPT, max_tokens: int = 4) -> list[int]:
    return expected_tokens(make_request("alone", prompt, max_tokens=max_tokens))


def finish_all(harness: Harness) -> None:
    """Let every copy end, including those that are started meanwhile."""
    while harness.copier.pending or harness.core.has_work:
        for job in list(harness.copier.pending):
            harness.copier.finish(job)
        harness.step()


@DEPTHS
def test_the_first_chunk_starts_with_the_load(depth: int) -> None:
    """Lesson 45: the step that starts the copy also has the first chunk, for the blocks that
    the host does not have, and names the load that it reads."""
    harness = make_harness(depth)

    plan = begin(harness)

    (batch,) = [b for b in harness.batches if "overlaps" in b.request_ids]
    assert batch.awaits == {0: plan.job}
    assert len(batch.tokens) == 43 - 32
    assert batch.block_tables[0][:8].tolist() == plan.target_slots.tolist()


@DEPTHS
def test_nothing_is_reported_or_committed_before_the_load_ends(depth: int) -> None:
    """The result is computed but held back: no token, no block, no hit; when the load ends, all
    of it counts at once."""
    harness = make_harness(depth)
    plan = begin(harness)
    for _ in range(5):
        harness.step()

    assert "overlaps" not in harness.outputs
    (sequence,) = harness.scheduler._table.overlapping
    assert harness.cache.match(sequence.path()).device_blocks == 0
    assert sum("overlaps" in batch.request_ids for batch in harness.batches) == 1
    computed = harness.runner.num_tokens

    harness.copier.finish(plan.job)
    harness.step()

    assert harness.outputs["overlaps"][:1] == right()[:1]
    assert harness.usages["overlaps"].by_tier["host"] == 32
    assert harness.usages["overlaps"].computed == 43 - 32
    finish_all(harness)
    assert harness.outputs["overlaps"] == right()
    assert harness.runner.num_tokens == computed + 3
    assert harness.core.stats().found_tokens["host"] == 32
    harness.check_empty()


@DEPTHS
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_failed_load_leaves_no_trace(depth: int, num_blocks: int) -> None:
    """Lessons 20, 22: if the load failed or is partial, the chunk is discarded and computed
    again from the first missing block."""
    harness = make_harness(depth)
    harness.copier.fails = lambda transfer: isinstance(transfer, LoadJob)
    plan = begin(harness)
    for _ in range(3):
        harness.step()
    harness.copier.fails = lambda transfer: False

    harness.copier.finish(plan.job, num_blocks)
    finish_all(harness)

    assert harness.outputs["overlaps"] == right()
    usage = harness.usages["overlaps"]
    assert usage.load is not None
    assert usage.load.shortfall == "load_failed"
    assert usage.by_tier["host"] == (0 if num_blocks == 0 else 32)
    assert harness.core.stats().num_admitted == 8
    harness.check_empty()


@DEPTHS
def test_a_late_executor_writes_only_to_quarantined_slots(depth: int) -> None:
    """Lesson 50: after the deadline the chunk is computed in other slots; the targets stay
    quarantined until the executor is quiet."""
    harness = make_harness(depth, timeouts={"copy_timeout_s": 0.2})
    harness.copier.fails = lambda transfer: isinstance(transfer, LoadJob)
    plan = begin(harness)
    harness.steps(3)
    harness.sleep()
    harness.steps(3)
    assert harness.cache.stats().device.quarantined == 8
    for _ in range(20):
        harness.copier.scribble(plan.job)
        harness.step()

    assert harness.outputs["overlaps"] == right()
    assert harness.usages["overlaps"].miss_reason == "timeout"
    finish_all(harness)
    assert harness.cache.stats().device.quarantined == 0
    harness.check_empty()


@DEPTHS
@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_abort_returns_every_slot(depth: int, num_steps: int) -> None:
    """Lesson 58: slots are returned with the chunk in flight or collected; the copy ends, and
    other requests find its blocks."""
    harness = make_harness(depth)
    plan = begin(harness)
    harness.steps(num_steps)

    harness.core.abort(harness.scheduler._table.alive["overlaps"].request_id)  # type: ignore[index]
    harness.copier.finish(plan.job)
    finish_all(harness)

    assert harness.reasons["overlaps"] == "abort"
    assert harness.outputs["overlaps"] == []
    harness.check_empty()
    harness.copier.held = False
    harness.run(make_request("next", PROMPT, max_tokens=4))
    assert harness.outputs["next"] == right()
    assert harness.usages["next"].by_tier["device"] == 32


@DEPTHS
def test_a_reset_discards_a_load_in_flight(depth: int) -> None:
    """Lesson 17: a load that ends after a reset belongs to an older generation; the chunk is
    computed again."""
    harness = make_harness(depth)
    plan = begin(harness)
    harness.steps(2)
    harness.core.reset_cache()

    harness.copier.finish(plan.job)
    finish_all(harness)

    assert harness.outputs["overlaps"] == right()
    assert harness.usages["overlaps"].cached_tokens == 0
    harness.check_empty()


@DEPTHS
def test_other_requests_wait_for_the_same_load_or_run_meanwhile(depth: int) -> None:
    """Lesson 26: there is one copy; later requests for the same prefix wait for it, other
    requests do not."""
    harness = make_harness(depth)
    plan = begin(harness)
    same = make_request("same", PROMPT[:33], max_tokens=2)
    other = make_request("other", make_prompt(9, family=3), max_tokens=3)

    harness.run_until("other", same, other)

    assert "same" not in harness.outputs
    harness.copier.finish(plan.job)
    finish_all(harness)
    assert harness.outputs["same"] == expected_tokens(same)
    assert harness.usages["same"].by_tier["host"] == 32
    loads = [p for p in harness.copier.started if isinstance(p, LoadJob)]
    assert loads == [plan]


@DEPTHS
def test_a_long_prompt_continues_in_chunks_after_the_load(depth: int) -> None:
    """The first chunk overlaps with the load; later chunks wait for its end and commit as
    usual."""
    harness = make_harness(depth, settings={"max_batched_tokens": 64, "long_prefill_tokens": 4})
    plan = begin(harness)
    harness.steps(4)
    assert sum("overlaps" in batch.request_ids for batch in harness.batches) == 1

    harness.copier.finish(plan.job)
    finish_all(harness)

    assert harness.outputs["overlaps"] == right()
    harness.check_empty()


@DEPTHS
def test_the_loop_sleeps_while_all_requests_wait_for_overlapped_loads(depth: int) -> None:
    """Lesson 15: while nothing can be computed before the copy ends, the loop sleeps."""
    harness = make_harness(depth)
    plan = begin(harness)
    while harness.scheduler.num_in_flight:
        harness.step()
    harness.step()

    before = harness.core.has_work
    harness.copier.finish(plan.job)

    assert (before, harness.core.has_work) == (False, True)
    finish_all(harness)
    assert harness.outputs["overlaps"] == right()


def test_a_runner_without_layerwise_is_never_given_an_overlapped_load() -> None:
    """Without `layerwise` a request waits for its load before it holds anything."""
    harness = make_harness(1)
    harness.scheduler._loader.layerwise = False
    begin(harness)

    assert not any("overlaps" in batch.request_ids for batch in harness.batches)
    finish_all(harness)
    assert harness.outputs["overlaps"] == right()
