"""A first chunk that starts with its promotion: it counts when that has landed, and never was
when that has failed.

The runner reads the very bytes that are copied. A row over a promotion that fails sees garbage,
so a token or a block of it that got out would be a wrong one.
"""

from typing import Any

import pytest

from headwater.cache import Promotion
from tests.scheduler.rig import Rig, expected_tokens, make_prompt, make_request

PROMPT = make_prompt(43)
"""Ten full blocks; the host has the first eight of them."""

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def make_rig(depth: int, **options: Any) -> Rig:
    """The host has eight blocks of PROMPT, the device has none; copies end when told to."""
    rig = Rig(num_blocks=24, host_blocks=64, depth=depth, layerwise=True, **options)
    for number in range(2):
        rig.run(make_request(f"warm{number}", PROMPT[:33], max_tokens=1))
    for family in range(5, 10):
        rig.run(make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1))
    rig.copier.held = True
    return rig


def begin(rig: Rig, max_tokens: int = 4) -> Promotion:
    """Let a request for PROMPT in; the promotion it rides on."""
    before = len(rig.copier.started)
    rig.add(make_request("rides", PROMPT, max_tokens=max_tokens))
    rig.step()
    (plan,) = [p for p in rig.copier.started[before:] if isinstance(p, Promotion)]
    return plan


def right(prompt: list[int] = PROMPT, max_tokens: int = 4) -> list[int]:
    return expected_tokens(make_request("alone", prompt, max_tokens=max_tokens))


def finish_all(rig: Rig) -> None:
    """Let every copy end, whatever is started on the way."""
    while rig.copier.pending or rig.core.has_work:
        for job in list(rig.copier.pending):
            rig.copier.finish(job)
        rig.step()


@DEPTHS
def test_the_chunk_starts_with_the_promotion(depth: int) -> None:
    """Lesson 45: the step that starts the copy has the first chunk too, for what the host has
    not; and it says what it reads."""
    rig = make_rig(depth)

    plan = begin(rig)

    (batch,) = [b for b in rig.batches if "rides" in b.request_ids]
    assert batch.awaits == {0: plan.job}
    assert len(batch.tokens) == 43 - 32
    assert batch.block_tables[0][:8].tolist() == plan.target_slots.tolist()


@DEPTHS
def test_nothing_is_told_or_committed_before_it_lands(depth: int) -> None:
    """Computed, chosen, and kept: not a token, not a block, not a hit; then all of it at once."""
    rig = make_rig(depth)
    plan = begin(rig)
    for _ in range(5):
        rig.step()

    assert "rides" not in rig.outputs
    (rider,) = rig.scheduler._table.overlapping
    assert rig.cache.match(rider.path()).device_blocks == 0
    assert sum("rides" in batch.request_ids for batch in rig.batches) == 1
    computed = rig.runner.num_tokens

    rig.copier.finish(plan.job)
    rig.step()

    assert rig.outputs["rides"][:1] == right()[:1]
    assert rig.usages["rides"].by_tier["host"] == 32
    assert rig.usages["rides"].computed == 43 - 32
    finish_all(rig)
    assert rig.outputs["rides"] == right()
    assert rig.runner.num_tokens == computed + 3
    assert rig.core.stats().found_tokens["host"] == 32
    rig.check_empty()


@DEPTHS
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_promotion_that_fails_never_was(depth: int, num_blocks: int) -> None:
    """Lessons 20, 22: failed or cut short, what was computed over it is discarded, and computed
    again from the first missing block."""
    rig = make_rig(depth)
    rig.copier.dooms = lambda transfer: isinstance(transfer, Promotion)
    plan = begin(rig)
    for _ in range(3):
        rig.step()
    rig.copier.dooms = lambda transfer: False

    rig.copier.finish(plan.job, num_blocks)
    finish_all(rig)

    assert rig.outputs["rides"] == right()
    usage = rig.usages["rides"]
    assert usage.load is not None
    assert usage.load.shortfall == "load_failed"
    assert usage.by_tier["host"] == (0 if num_blocks == 0 else 32)
    assert rig.core.stats().num_admitted == 8
    rig.check_empty()


@DEPTHS
def test_an_executor_that_is_late_writes_where_nobody_reads(depth: int) -> None:
    """Lesson 50: after the deadline it is computed elsewhere; the targets wait until it is quiet."""
    rig = make_rig(depth, timeouts={"copy_timeout_s": 0.2})
    rig.copier.dooms = lambda transfer: isinstance(transfer, Promotion)
    plan = begin(rig)
    rig.steps(3)
    rig.sleep()
    rig.steps(3)
    assert rig.cache.stats().device.quarantined == 8
    for _ in range(20):
        rig.copier.scribble(plan.job)
        rig.step()

    assert rig.outputs["rides"] == right()
    assert rig.usages["rides"].miss_reason == "timeout"
    finish_all(rig)
    assert rig.cache.stats().device.quarantined == 0
    rig.check_empty()


@DEPTHS
@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_abort_returns_every_slot(depth: int, num_steps: int) -> None:
    """Lesson 58: with the chunk in flight or collected; the copy lands, and is there for others."""
    rig = make_rig(depth)
    plan = begin(rig)
    rig.steps(num_steps)

    rig.core.abort(rig.scheduler._table.alive["rides"].request_id)  # type: ignore[index]
    rig.copier.finish(plan.job)
    finish_all(rig)

    assert rig.reasons["rides"] == "abort"
    assert rig.outputs["rides"] == []
    rig.check_empty()
    rig.copier.held = False
    rig.run(make_request("next", PROMPT, max_tokens=4))
    assert rig.outputs["next"] == right()
    assert rig.usages["next"].by_tier["device"] == 32


@DEPTHS
def test_a_reset_meanwhile_discards_it(depth: int) -> None:
    """Lesson 17: what lands after a reset is of an older generation; the chunk is computed again."""
    rig = make_rig(depth)
    plan = begin(rig)
    rig.steps(2)
    rig.core.reset_cache()

    rig.copier.finish(plan.job)
    finish_all(rig)

    assert rig.outputs["rides"] == right()
    assert rig.usages["rides"].cached_tokens == 0
    rig.check_empty()


@DEPTHS
def test_others_wait_for_the_same_promotion_and_run_meanwhile(depth: int) -> None:
    """Lesson 26: one copy; who comes later for the same prefix waits for it, others do not."""
    rig = make_rig(depth)
    plan = begin(rig)
    same = make_request("same", PROMPT[:33], max_tokens=2)
    other = make_request("other", make_prompt(9, family=3), max_tokens=3)

    rig.run_until("other", same, other)

    assert "same" not in rig.outputs
    rig.copier.finish(plan.job)
    finish_all(rig)
    assert rig.outputs["same"] == expected_tokens(same)
    assert rig.usages["same"].by_tier["host"] == 32
    promotions = [p for p in rig.copier.started if isinstance(p, Promotion)]
    assert promotions == [plan]


@DEPTHS
def test_a_long_prompt_goes_on_in_chunks_after_the_landing(depth: int) -> None:
    """The first chunk rides; the next ones wait for the landing, and commit as ever."""
    rig = make_rig(depth, settings={"max_batched_tokens": 64, "long_prefill_tokens": 4})
    plan = begin(rig)
    rig.steps(4)
    assert sum("rides" in batch.request_ids for batch in rig.batches) == 1

    rig.copier.finish(plan.job)
    finish_all(rig)

    assert rig.outputs["rides"] == right()
    rig.check_empty()


@DEPTHS
def test_a_loop_whose_requests_only_ride_sleeps(depth: int) -> None:
    """Lesson 15: nothing to compute before the copy ends is no work."""
    rig = make_rig(depth)
    plan = begin(rig)
    while rig.scheduler.num_in_flight:
        rig.step()
    rig.step()

    before = rig.core.has_work
    rig.copier.finish(plan.job)

    assert (before, rig.core.has_work) == (False, True)
    finish_all(rig)
    assert rig.outputs["rides"] == right()


def test_a_runner_that_waits_for_whole_promotions_is_never_given_one() -> None:
    """Without `layerwise` a request waits for its promotion before it holds anything."""
    rig = make_rig(1)
    rig.scheduler._loader.layerwise = False
    begin(rig)

    assert not any("rides" in batch.request_ids for batch in rig.batches)
    finish_all(rig)
    assert rig.outputs["rides"] == right()
