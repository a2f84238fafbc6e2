"""Loads from lower tiers in a whole engine: hits, waits, and the cost of failures.

The runner's KV, the host slab and the stored blocks are real bytes, so a block that is copied
or reused wrongly gives other tokens.
"""

from dataclasses import replace
from typing import Any

import pytest

from headwater.cache import LoadJob, Lookup, TokenPath
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from tests.engine.tier_harness import (
    PROMPT,
    always,
    make_faulty,
    make_through,
    make_warm,
    never,
)
from tests.scheduler.harness import expected_tokens, make_prompt, make_request, make_storage


def test_a_hit_below_the_device_counts_for_the_tier_it_was_found_in() -> None:
    """Lesson 64: usage and ledger name the host, and the reason of the load."""
    harness = make_warm()
    before = harness.runner.num_tokens

    harness.run(make_request("again", PROMPT, max_tokens=1))

    usage = harness.usages["again"]
    assert usage.by_tier == {"device": 0, "host": 32, "storage": 0, "peer": 0}
    assert (usage.cached_tokens, usage.computed, usage.miss_reason) == (32, 1, None)
    assert usage.load is not None
    assert (usage.load.choice, usage.load.num_blocks, usage.load.shortfall) == (
        "unmeasured",
        8,
        None,
    )
    assert harness.runner.num_tokens == before + 1


def test_a_storage_hit_counts_for_storage() -> None:
    """Another engine on the same storage finds what the first one wrote; lesson 40: writing the
    same blocks again moves nothing."""
    storage = make_storage()
    first = make_through(storage)
    first.run(make_request("a", PROMPT, max_tokens=1))
    written = storage.stats().blocks_written
    second = make_through(storage)

    second.run(make_request("b", PROMPT, max_tokens=1))

    assert written == 8
    assert second.usages["b"].by_tier == {"device": 0, "host": 0, "storage": 32, "peer": 0}
    assert second.outputs["b"] == first.outputs["a"]
    assert second.runner.num_tokens == 1
    assert storage.stats().blocks_written == written


def test_fifty_requests_for_one_stored_prefix_share_one_load() -> None:
    """Lesson 26: there is one read and one copy, and every request hits."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    harness = make_through(storage, num_blocks=80, settings={"max_num_seqs": 64})
    requests = [make_request(f"r{n}", PROMPT, max_tokens=2) for n in range(50)]

    harness.run(*requests)

    loads = [p for p in harness.copier.started if isinstance(p, LoadJob)]
    reads = [p for p in harness.workers.started if isinstance(p, LoadJob)]
    assert (len(loads), len(reads)) == (1, 1)
    assert all(harness.outputs[r.request_id] == expected_tokens(r) for r in requests)
    assert all(usage.by_tier["storage"] == 32 for usage in harness.usages.values())


class CountingStorage(MemoryStorage):
    """Records how many prompts each call looks up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def contains(self, runs, *, timeout_s):
        self.asked.append(len(runs))
        return super().contains(runs, timeout_s=timeout_s)


def test_the_lookups_of_one_step_are_one_call() -> None:
    """Lesson 25: eight prompts that come together are one lookup call with eight answers."""
    form = BlockFormat(fingerprint=bytes(32), block_bytes=32)
    storage = CountingStorage(MemoryConfig(), form)
    prompts = [make_prompt(20 + n, family=n) for n in range(8)]
    make_through(storage).run(make_request("a", prompts[0], max_tokens=1))
    make_through(storage).run(make_request("b", prompts[3][:13], max_tokens=1))
    storage.asked.clear()
    harness = make_through(storage, num_blocks=80)

    requests = [make_request(f"r{n}", prompt, max_tokens=2) for n, prompt in enumerate(prompts)]
    harness.run(*requests)

    assert storage.asked == [8]
    found = [harness.usages[r.request_id].by_tier["storage"] for r in requests]
    assert found == [16, 0, 0, 12, 0, 0, 0, 0]
    assert all(harness.outputs[r.request_id] == expected_tokens(r) for r in requests)


def test_while_a_load_is_in_flight_others_run_and_nothing_is_held() -> None:
    """Lessons 13, 45: the step does not wait for a copy; the sequence that waits for the copy
    has no slots."""
    harness = make_warm()
    harness.copier.held = True
    harness.add(make_request("loads", PROMPT, max_tokens=1))
    harness.step()
    assert harness.cache.stats().device.moving == 8

    harness.run_until("other", make_request("other", make_prompt(9, family=3), max_tokens=4))

    assert "loads" not in harness.outputs
    assert harness.cache.stats().leases == 0
    (job,) = [job for job, (plan, _) in harness.copier.pending.items() if plan.num_blocks == 8]
    harness.copier.finish(job)
    harness.run()
    assert harness.usages["loads"].by_tier["host"] == 32


def test_copies_in_flight_alone_are_no_work_for_the_loop() -> None:
    """Lesson 15: a loop whose requests all wait for copies sleeps until one is done."""
    harness = make_warm()
    harness.copier.held = True
    harness.add(make_request("loads", PROMPT, max_tokens=1))
    harness.step()

    was_working, sleep_s = harness.core.has_work, harness.core.sleep_s()
    harness.copier.finish(next(iter(harness.copier.pending)))

    assert not was_working
    assert sleep_s == pytest.approx(5.0, abs=0.1)
    assert harness.core.has_work
    harness.run()
    assert harness.reasons["loads"] == "length"


def test_a_deadline_ends_the_wait_and_not_the_job() -> None:
    """Lessons 38, 50: the request computes; the late copy ends in its own slots, for other
    requests."""
    harness = make_warm(settings={"load_timeout_s": 0.5})
    harness.copier.held = True
    harness.add(make_request("late", PROMPT, max_tokens=1))
    harness.step()
    harness.sleep()

    while "late" not in harness.reasons:
        harness.step()

    assert harness.usages["late"].miss_reason == "timeout"
    assert harness.outputs["late"] == expected_tokens(
        make_request("alone", PROMPT, max_tokens=1)
    )
    assert harness.cache.stats().device.moving == 8
    harness.copier.finish(next(iter(harness.copier.pending)))
    harness.run()
    harness.check_empty()


def test_a_timed_out_copy_that_writes_late_touches_no_reused_slot() -> None:
    """Lesson 50: slots of the copy are quarantined until it is quiet, then they are free
    again."""
    harness = make_warm(timeouts={"copy_timeout_s": 0.2})
    harness.copier.held = True
    harness.add(make_request("late", PROMPT, max_tokens=1))
    harness.step()
    harness.sleep()
    harness.step()
    assert harness.cache.stats().device.quarantined == 8

    job = next(iter(harness.copier.pending))
    harness.add(make_request("busy", make_prompt(30, family=9), max_tokens=2))
    for _ in range(20):
        harness.copier.scribble(job)
        harness.step()
    assert harness.cache.stats().device.quarantined == 8
    harness.copier.finish(job)
    harness.run()

    assert harness.outputs["late"] == expected_tokens(
        make_request("alone", PROMPT, max_tokens=1)
    )
    assert harness.outputs["busy"] == expected_tokens(
        make_request("alone", make_prompt(30, family=9), max_tokens=2)
    )
    assert harness.cache.stats().device.quarantined == 0
    assert harness.core.stats().links["host_to_device"].failures == {"timeout": 1}
    harness.check_empty()


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_failed_or_partial_load_is_computed_instead(num_blocks: int) -> None:
    """Lessons 20, 22: the blocks that arrived are used; the rest is computed."""
    harness = make_warm()
    harness.copier.held = True
    harness.add(make_request("again", PROMPT, max_tokens=1))
    harness.step()
    harness.copier.finish(next(iter(harness.copier.pending)), num_blocks=num_blocks)
    harness.copier.held = False

    harness.run()

    usage = harness.usages["again"]
    assert harness.outputs["again"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert usage.cached_tokens in (4 * num_blocks, 32)
    if not num_blocks:
        assert usage.miss_reason == "load_failed"


@pytest.mark.parametrize("fault", ["error", "damaged", "lost", "hung"])
def test_a_storage_fault_costs_the_hit_and_nothing_else(fault: str) -> None:
    """Lessons 38, 44, 45, 63: the request computes its prompt, and its usage has the reason."""
    storage = make_faulty(never)
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    harness = make_through(storage, held=fault == "hung")
    keys = harness.cache.keys(TokenPath(PROMPT), 8)
    if fault == "error":
        storage.roll = always
    elif fault == "damaged":
        storage.values[keys[2]] = bytearray(storage.values[keys[2]][:-1]) + b"?"
    harness.add(make_request("b", PROMPT, max_tokens=1))
    if fault == "lost":
        harness.step()
        storage.values.pop(keys[2])
        storage.values.pop(keys[3])
    harness.copier.held = False
    harness.run()

    assert harness.outputs["b"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    usage = harness.usages["b"]
    if fault == "error":
        assert (usage.miss_reason, usage.cached_tokens) == ("storage_failed", 0)
    elif fault == "damaged":
        assert (usage.miss_reason, usage.cached_tokens) == ("damaged", 8)
    elif fault == "hung":
        assert (usage.miss_reason, usage.cached_tokens) == ("storage_timeout", 0)


def test_a_hung_storage_read_delays_no_other_request() -> None:
    """Lessons 17, 38: a read that never returns costs only its own host slots; a request that
    needs the whole device gets it."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    harness = make_through(storage, timeouts={"read_timeout_s": 1.0})
    harness.run(make_request("head", PROMPT[:9], max_tokens=1))
    harness.workers.held = True
    harness.add(make_request("b", PROMPT, max_tokens=1))
    harness.step()
    harness.workers.work_off()
    harness.step()
    (task,) = harness.workers.tasks
    assert not isinstance(task.plan, Lookup)
    assert task.claim()
    harness.workers.tasks.clear()

    harness.run()
    harness.run(make_request("whole", make_prompt(60, family=4), max_tokens=4))

    assert harness.outputs["b"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert harness.reasons["whole"] == "length"
    assert harness.cache.stats().host.quarantined > 0
    harness.workers.held = False
    harness.workers.run(task)
    harness.workers.work_off()
    harness.run()
    harness.check_empty()
    assert harness.cache.stats().host.quarantined == 0


def test_a_reset_with_copies_in_flight_forgets_and_releases() -> None:
    """Lesson 17: a reset waits for no worker; an earlier copy only releases its slots."""
    harness = make_warm()
    harness.copier.held = True
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    harness.core.reset_cache()
    harness.copier.finish(next(iter(harness.copier.pending)))

    harness.run()

    assert harness.outputs["a"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert harness.usages["a"].cached_tokens == 0
    harness.check_empty()


def test_an_abort_while_loading_returns_every_slot() -> None:
    """Lesson 58: the load continues for other requests; nothing is kept for the aborted one."""
    harness = make_warm()
    harness.copier.held = True
    request = make_request("a", PROMPT, max_tokens=1)
    harness.add(request)
    harness.step()

    harness.core.abort(request.request_id)
    harness.step()
    harness.copier.finish(next(iter(harness.copier.pending)))
    harness.copier.held = False
    harness.run(make_request("b", PROMPT, max_tokens=1))

    assert harness.reasons["a"] == "abort"
    assert harness.usages["b"].cached_tokens == 32
    harness.check_empty()


def test_one_request_is_loaded_for_a_bounded_number_of_times() -> None:
    """If every load brings only one block, the rest is computed after eight loads: a request
    does not wait for one load per block."""
    prompt = make_prompt(4 * 20 + 1)
    harness = make_through(make_storage(), num_blocks=24)
    harness.run(make_request("a", prompt, max_tokens=1))
    harness.core.reset_cache(("device",))
    before = len(harness.copier.started)
    harness.copier.held = True
    again = replace(make_request("again", prompt, max_tokens=2), load_policy="wait")
    harness.add(again)

    for _ in range(60):
        for job in list(harness.copier.pending):
            harness.copier.finish(job, 1)
        harness.step()

    loads = [job for job in harness.copier.started[before:] if isinstance(job, LoadJob)]
    assert len(loads) == 8
    assert harness.outputs["again"] == expected_tokens(again)
