"""Forgetting tiers while requests run: at once in memory, after the last write in storage."""

from typing import Any

import pytest

from headwater.engine.client import ResetReport
from headwater.errors import RequestError, StorageError
from headwater.transfer.workers import Task
from headwater.types import WritePolicy
from tests.scheduler.rig import Rig, expected_tokens, make_prompt, make_request, make_storage

PROMPT = make_prompt(33)
EVERYTHING = ("device", "host", "storage")


def make_rig(**options: Any) -> Rig:
    """Device, host and storage have the eight full blocks of PROMPT."""
    whole: dict[str, Any] = {"num_blocks": 32, "host_blocks": 64, "stored": make_storage()}
    rig = Rig(**(whole | {"write_policy": WritePolicy.WRITE_THROUGH} | options))
    rig.run(make_request("before", PROMPT, max_tokens=1))
    return rig


def begin_write(rig: Rig) -> Task:
    """Another eight blocks are computed, and their write to storage begins and does not end."""
    rig.workers.held = True
    rig.add(make_request("writes", make_prompt(33, family=2), max_tokens=1))
    rig.step()
    rig.workers.work_off()  # the question whether storage has them
    rig.run()
    (task,) = rig.workers.tasks
    return task


def reset(rig: Rig, *tiers: str) -> list[ResetReport]:
    """The report, once there is one."""
    reports: list[ResetReport] = []
    rig.core.reset_cache(tiers, reports.append)
    return reports


def found(rig: Rig, name: str) -> dict[str, int]:
    """Where the blocks of PROMPT are found by a request that comes now."""
    rig.run(make_request(name, PROMPT, max_tokens=1))
    assert rig.outputs[name] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    by_tier = rig.usages[name].by_tier
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
    """Lesson 59: each tier by itself; the next request finds what the others have."""
    rig = make_rig()

    reports = reset(rig, *tiers)
    rig.run()

    (report,) = reports
    assert (report.removed, report.refusal) == (removed, None)
    assert set(report.kept.values()) == {0}
    assert found(rig, "after") == left
    rig.check_empty()


def test_storage_is_forgotten_after_the_writes_that_began_before():
    """Lessons 17, 59: a write in flight would put back what was to go; so it is waited for."""
    rig = make_rig()
    begin_write(rig)
    reports = reset(rig, *EVERYTHING)
    rig.step()

    assert reports == []
    assert len(rig.workers.tasks) == 1
    rig.workers.work_off()
    rig.step()
    rig.workers.work_off()
    rig.step()

    (report,) = reports
    assert report.removed["storage"] == 16
    assert rig.storage.stats().num_blocks == 0
    rig.workers.held = False
    assert found(rig, "after") == {}
    assert rig.storage.stats().num_blocks == 8
    rig.check_empty()


def test_a_write_that_never_ends_refuses_the_reset():
    """Lesson 17: nobody waits for a worker that does not answer; the reason is told."""
    rig = make_rig()
    task = begin_write(rig)
    assert task.claim()
    reports = reset(rig, *EVERYTHING)

    rig.clock.advance(5.1)
    assert rig.core.has_work
    rig.step()

    (report,) = reports
    assert report.refusal == "storage was not forgotten: 1 writes to it do not end"
    assert report.removed == {"device": 8, "host": 8}
    assert report.kept == {"device": 8, "host": 8}, "what is being written stays where it is"
    rig.workers.run(task)
    rig.workers.held = False
    rig.run()
    rig.check_empty()


def test_storage_that_fails_refuses_the_reset():
    """It says so, and memory is forgotten nevertheless."""
    rig = make_rig()

    def fail(keys, *, timeout_s):
        raise StorageError("gone")

    rig.storage.remove = fail  # type: ignore[method-assign]  # a medium that fails
    reports = reset(rig, *EVERYTHING)
    rig.run()

    (report,) = reports
    assert report.refusal is not None
    assert "it failed" in report.refusal
    assert found(rig, "after") == {"storage": 8}


@pytest.mark.parametrize(
    ("tiers", "stored", "why"),
    [
        (("storage",), True, "together with device and host only"),
        (EVERYTHING, False, "there is no storage"),
        (("attic",), True, "tiers are device, host, storage"),
        ((), True, "tiers are"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(tiers, stored, why):
    """And changes nothing."""
    rig = make_rig() if stored else make_rig(stored=None)

    with pytest.raises(RequestError, match=why):
        reset(rig, *tiers)

    assert found(rig, "after") == {"device": 8}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tiers", [("device",), ("host",), ("device", "host"), EVERYTHING])
def test_running_requests_go_on_with_what_they_have(tiers, depth):
    """Lesson 59: again and again under traffic, and not one wrong token."""
    rig = make_rig(depth=depth, num_blocks=40)
    requests = [
        make_request(f"r{n}", make_prompt(20 + n, family=n % 3), max_tokens=12)
        for n in range(9)
    ]
    pending = list(requests)
    reports: list[ResetReport] = []
    while any(request.request_id not in rig.reasons for request in requests):
        if pending:
            rig.add(pending.pop())
        rig.steps(2)
        rig.core.reset_cache(tiers, reports.append)

    rig.run()

    assert all(rig.outputs[r.request_id] == expected_tokens(r) for r in requests)
    assert len(reports) >= 9
    assert all(report.refusal is None for report in reports)
    rig.check_empty()
