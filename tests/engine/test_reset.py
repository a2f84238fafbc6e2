"""Emptying tiers while requests run: at once in memory, after the last write in storage."""

from typing import Any

import pytest

from headwater.engine.client import ResetReport
from headwater.errors import RequestError, StorageError
from headwater.transfer.workers import Task
from headwater.types import WritePolicy
from tests.scheduler.harness import (
    Harness,
    expected_tokens,
    make_prompt,
    make_request,
    make_storage,
)

PROMPT = make_prompt(33)
EVERYTHING = ("device", "host", "storage")


def make_harness(**options: Any) -> Harness:
    """Device, host and storage have the eight full blocks of PROMPT."""
    whole: dict[str, Any] = {"num_blocks": 32, "host_blocks": 64, "stored": make_storage()}
    harness = Harness(**(whole | {"write_policy": WritePolicy.WRITE_THROUGH} | options))
    harness.run(make_request("before", PROMPT, max_tokens=1))
    return harness


def begin_write(harness: Harness) -> Task:
    """Another eight blocks are computed; their write to storage begins and does not end."""
    harness.workers.held = True
    harness.add(make_request("writes", make_prompt(33, family=2), max_tokens=1))
    harness.step()
    harness.workers.work_off()  # the lookup in storage
    harness.run()
    (task,) = harness.workers.tasks
    return task


def reset(harness: Harness, *tiers: str) -> list[ResetReport]:
    """Reset these tiers and return the report when it has arrived."""
    reports: list[ResetReport] = []
    harness.core.reset_cache(tiers, reports.append)
    return reports


def found(harness: Harness, name: str) -> dict[str, int]:
    """Where a request that comes now finds the blocks of PROMPT."""
    harness.run(make_request(name, PROMPT, max_tokens=1))
    assert harness.outputs[name] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    by_tier = harness.usages[name].by_tier
    return {tier: by_tier[tier] // 4 for tier in EVERYTHING if by_tier[tier]}


@pytest.mark.parametrize(
    ("tiers", "removed", "left"),
    [
        (("device",), {"device": 8}, {"host": 8}),
        (("host",), {"host": 8}, {"device": 8}),
        (("device", "host"), {"device": 8, "host": 8}, {"storage": 8}),
        (EVERYTHING, {"device": 8, "host": 8, "storage": 8}, {}),
    ],
)
def test_only_what_was_named_is_forgotten(tiers, removed, left):
    """Lesson 59: each tier can be reset separately; the next request finds the blocks of the
    other tiers."""
    harness = make_harness()

    reports = reset(harness, *tiers)
    harness.run()

    (report,) = reports
    assert (report.removed, report.refusal) == (removed, None)
    assert set(report.kept.values()) == {0}
    assert found(harness, "after") == left
    harness.check_empty()


def test_storage_is_forgotten_after_the_writes_that_began_before():
    """Lessons 17, 59: a write in flight would store removed blocks again, so the reset waits
    for it."""
    harness = make_harness()
    begin_write(harness)
    reports = reset(harness, *EVERYTHING)
    harness.step()

    assert reports == []
    assert len(harness.workers.tasks) == 1
    harness.workers.work_off()
    harness.step()
    harness.workers.work_off()
    harness.step()

    (report,) = reports
    assert report.removed["storage"] == 16
    assert harness.storage.stats().num_blocks == 0
    harness.workers.held = False
    assert found(harness, "after") == {}
    assert harness.storage.stats().num_blocks == 8
    harness.check_empty()


def test_a_write_that_never_ends_refuses_the_reset():
    """Lesson 17: the reset does not wait for a worker that does not answer; it reports the
    reason."""
    harness = make_harness()
    task = begin_write(harness)
    assert task.claim()
    reports = reset(harness, *EVERYTHING)

    harness.clock.advance(5.1)
    assert harness.core.has_work
    harness.step()

    (report,) = reports
    assert report.refusal == (
        "storage was not emptied: 1 earlier writes did not end within 5 s"
    )
    assert report.removed == {"device": 16, "host": 16}
    assert report.kept == {"device": 0, "host": 0}
    quarantined = harness.cache.stats().host.quarantined
    assert quarantined == 8, "the lost write may still read its slots"
    harness.workers.run(task)
    harness.workers.held = False
    harness.run()
    harness.check_empty()


def test_a_write_that_timed_out_is_waited_for_until_its_call_returns():
    """The reset waits beyond the deadline of the write: a lost call that returns later would
    put blocks into storage again after it was emptied."""
    harness = make_harness()
    task = begin_write(harness)
    assert task.claim()
    harness.clock.advance(60.1)
    harness.step()
    assert harness.core.stats().links["host_to_storage"].failures == {"timeout": 1}

    reports = reset(harness, *EVERYTHING)
    harness.step()
    assert (reports, harness.workers.tasks) == ([], [task]), "nothing is removed before its end"
    harness.workers.run(task)
    harness.workers.tasks.remove(task)
    harness.workers.held = False
    harness.run()

    (report,) = reports
    assert report.refusal is None
    assert harness.storage.stats().num_blocks == 0
    harness.check_empty()


def test_storage_that_fails_refuses_the_reset():
    """The report has the failure; memory is emptied nevertheless."""
    harness = make_harness()

    def fail(keys, *, timeout_s):
        raise StorageError("gone")

    harness.storage.remove = fail  # type: ignore[method-assign]  # a medium that fails
    reports = reset(harness, *EVERYTHING)
    harness.run()

    (report,) = reports
    assert report.refusal is not None
    assert "the removal failed" in report.refusal
    assert found(harness, "after") == {"storage": 8}


@pytest.mark.parametrize(
    ("tiers", "stored", "why"),
    [
        (("storage",), True, "only be emptied together with device and host"),
        (EVERYTHING, False, "has no storage tier"),
        (("attic",), True, "one or more of device, host, storage; got attic"),
        ((), True, "got none"),
    ],
)
def test_an_impossible_reset_is_refused_with_the_reason(tiers, stored, why):
    """A refused reset changes nothing."""
    harness = make_harness() if stored else make_harness(stored=None)

    with pytest.raises(RequestError, match=why):
        reset(harness, *tiers)

    assert found(harness, "after") == {"device": 8}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tiers", [("device",), ("host",), ("device", "host"), EVERYTHING])
def test_running_requests_go_on_with_what_they_have(tiers, depth):
    """Lesson 59: repeated resets under traffic cause no wrong token."""
    harness = make_harness(depth=depth, num_blocks=40)
    requests = [
        make_request(f"r{n}", make_prompt(20 + n, family=n % 3), max_tokens=12)
        for n in range(9)
    ]
    pending = list(requests)
    reports: list[ResetReport] = []
    while any(request.request_id not in harness.reasons for request in requests):
        if pending:
            harness.add(pending.pop())
        harness.steps(2)
        harness.core.reset_cache(tiers, reports.append)

    harness.run()

    assert all(harness.outputs[r.request_id] == expected_tokens(r) for r in requests)
    assert len(reports) >= 9
    assert all(report.refusal is None for report in reports)
    harness.check_empty()
