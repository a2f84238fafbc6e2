"""Which sequences wait for a load, for how long, and what the usage reports."""

from dataclasses import replace
from typing import Any

import pytest

from headwater.cache import LoadJob, Lookup, OffloadJob
from headwater.errors import ConfigError, RequestError
from headwater.scheduler.config import SchedulerConfig
from headwater.types import WritePolicy
from tests.scheduler.harness import (
    Harness,
    expected_tokens,
    make_prompt,
    make_request,
    make_storage,
)

PROMPT = make_prompt(33)
"""Eight full blocks, and the token that is always computed."""


def make_harness(**options: Any) -> Harness:
    """The host has the blocks of PROMPT; the device does not have them."""
    whole: dict[str, Any] = {"num_blocks": 17, "host_blocks": 64}
    harness = Harness(**(whole | options))
    for number in range(2):
        harness.run(make_request(f"warm{number}", PROMPT, max_tokens=1))
    for family in range(5, 9):
        harness.run(
            make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1)
        )
    return harness


def make_stored(**options: Any) -> Harness:
    """Only storage has the blocks of PROMPT."""
    whole: dict[str, Any] = {"num_blocks": 17, "host_blocks": 64, "stored": make_storage()}
    whole |= {"write_policy": WritePolicy.WRITE_THROUGH}
    Harness(**whole).run(make_request("before", PROMPT, max_tokens=1))
    return Harness(**(whole | options))


def make_measured(*, token_s: float, block_s: float, **options: Any) -> Harness:
    """A harness as from `make_harness`, whose loop has measured prompts and copies already."""
    harness = make_harness(**options)
    harness.runner.token_s, harness.copier.block_s = token_s, block_s
    harness.run(make_request("probe", PROMPT, max_tokens=1))
    assert harness.usages["probe"].by_tier["host"] == 32
    for family in range(9, 13):
        harness.run(
            make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1)
        )
    harness.copier.started.clear()
    return harness


def test_a_prefix_that_is_cheaper_to_compute_is_computed_and_reported():
    """Lessons 45, 63: nothing is copied, and the usage says `recompute_cheaper` with prices."""
    harness = make_measured(token_s=1e-6, block_s=1.0)

    harness.run(make_request("a", PROMPT, max_tokens=1))

    usage = harness.usages["a"]
    assert (usage.cached_tokens, usage.miss_reason) == (0, "recompute_cheaper")
    assert usage.load is not None
    assert 0 < (usage.load.recompute_s or 0) < 1e-3
    assert usage.load.load_s == pytest.approx(8.0)
    assert not any(isinstance(plan, LoadJob) for plan in harness.copier.started)
    assert harness.core.stats().load_choices == {"unmeasured": 1, "recompute_cheaper": 1}
    assert harness.core.stats().misses["recompute_cheaper"] == 1


def test_a_split_loads_the_head_and_computes_the_tail():
    """Only blocks that arrive in time are loaded; the rest is computed."""
    harness = make_measured(token_s=0.05, block_s=0.1, settings={"load_timeout_s": 0.301})

    harness.run(make_request("a", PROMPT, max_tokens=1))

    usage = harness.usages["a"]
    assert usage.load is not None
    assert (usage.load.choice, usage.load.num_blocks) == ("split", 3)
    assert usage.by_tier["host"] == 12
    assert usage.computed == 21
    assert harness.outputs["a"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))


def test_a_priced_wait_ends_with_its_price():
    """Lesson 38: a load that should be cheap but does not end is waited for at most twice as
    long as computing takes."""
    harness = make_measured(token_s=0.05, block_s=0.001)
    harness.copier.held = True
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    speed = harness.core.stats().rates.prefill_tokens_s
    assert speed

    while "a" not in harness.reasons:
        if not harness.core.has_work:
            harness.sleep()
        harness.step()

    load = harness.usages["a"].load
    assert load is not None
    assert (load.choice, load.shortfall) == ("load_cheaper", "timeout")
    assert load.waited_s == pytest.approx(2 * 33 / speed, abs=0.05)
    assert load.waited_s < 5.0
    harness.copier.finish(next(iter(harness.copier.pending)))
    harness.run()


def test_a_wait_for_an_answer_ends_with_the_price_of_computing():
    """Lesson 38: the wait for silent storage ends before its timeout, also for the second
    request ever, whose price comes from the first."""
    harness = make_stored()
    harness.runner.token_s = 0.001
    harness.run(make_request("first", make_prompt(40, family=9), max_tokens=1))
    harness.workers.held = True
    harness.add(make_request("a", PROMPT, max_tokens=1))

    while "a" not in harness.reasons:
        if not harness.core.has_work:
            harness.sleep()
        harness.step()

    usage = harness.usages["a"]
    assert usage.load is not None
    assert usage.load.waited_s == pytest.approx(2 * 33 * 0.001, abs=0.02)
    assert usage.miss_reason == "timeout"


def test_a_request_may_override_the_load_policy():
    """The settings price and compute; a request with its own policy loads, others do not."""
    harness = make_measured(token_s=1e-6, block_s=1.0)

    harness.run(replace(make_request("waits", PROMPT, max_tokens=1), load_policy="wait"))

    usage = harness.usages["waits"]
    assert usage.load is not None
    assert (usage.load.choice, usage.by_tier["host"]) == ("policy_wait", 32)
    harness.run(
        *(make_request(f"c{n}", make_prompt(60, family=n), max_tokens=1) for n in (9, 10))
    )
    harness.run(make_request("priced", PROMPT, max_tokens=1))
    assert harness.usages["priced"].miss_reason == "recompute_cheaper"


def test_a_request_may_have_its_own_deadline():
    """A request's deadline is shorter than that of the settings, and applies only to this
    request."""
    harness = make_measured(token_s=1e-6, block_s=1.0, settings={"load_policy": "deadline"})
    harness.copier.held = True
    short = make_request("short", PROMPT, max_tokens=1)
    harness.add(replace(short, load_timeout_s=0.25))
    harness.step()
    harness.sleep()

    while "short" not in harness.reasons:
        harness.step()

    load = harness.usages["short"].load
    assert load is not None
    assert load.shortfall == "timeout"
    assert 0.25 <= load.waited_s < 0.5
    harness.copier.finish(next(iter(harness.copier.pending)))
    harness.run()


@pytest.mark.parametrize("field", [{"load_policy": "sometimes"}, {"load_timeout_s": -1.0}])
def test_an_invalid_load_option_is_refused(field):
    """The message has the field's name, and comes before anything is sent."""
    with pytest.raises(RequestError, match=next(iter(field))):
        replace(make_request("a", PROMPT), **field)


def test_the_loop_sleeps_while_requests_wait_for_a_lookup():
    """Lesson 45: the lookup is sent in the first turn, and the loop sleeps until the answer has
    come or is late; after an empty answer the step follows."""
    harness = Harness(num_blocks=17, host_blocks=64, stored=make_storage())
    harness.workers.held = True

    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.core.step()

    assert not harness.core.has_work
    assert harness.core.sleep_s() == pytest.approx(0.002)
    harness.workers.work_off()
    harness.core.step()
    assert harness.names() == ["a"]


def test_best_effort_does_not_sleep_until_the_lookup_ends():
    """Lesson 45: a best-effort request waits for nothing, so the loop has work."""
    settings = {"load_policy": "best_effort"}
    harness = Harness(num_blocks=17, host_blocks=64, stored=make_storage(), settings=settings)
    harness.workers.held = True

    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.core.step()

    assert harness.names() == ["a"]


def test_the_ledger_has_choices_with_their_prices():
    """The ledger has recent decisions with their prices, and the rates for the next
    decision."""
    harness = make_measured(token_s=0.05, block_s=0.1, settings={"load_timeout_s": 0.301})

    harness.run(make_request("a", PROMPT, max_tokens=1))

    stats = harness.core.stats()
    *_, last = stats.recent_loads
    assert last == harness.usages["a"].load
    assert (last.choice, last.host_blocks, last.storage_blocks) == ("split", 8, 0)
    assert last.load_s == pytest.approx(0.3)
    assert last.recompute_s is not None
    assert last.chosen_s == pytest.approx(0.3 + 5 / 8 * last.recompute_s)
    assert stats.rates.host is not None
    assert stats.rates.host.block_s == pytest.approx(0.1)
    assert stats.rates.prefill_tokens_s is not None
    assert stats.rates.prefill_tokens_s < 1 / 0.02


def test_wait_loads_whatever_it_costs():
    """The policy `wait` has no price, and no limit except the deadlines of transfers."""
    settings = {"load_policy": "wait", "load_timeout_s": 0.0}
    harness = make_measured(token_s=1e-6, block_s=1.0, settings=settings)
    harness.copier.held = True
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    harness.clock.advance(20.0)
    harness.step()
    assert "a" not in harness.usages
    harness.copier.finish(next(iter(harness.copier.pending)))

    harness.run()

    assert harness.usages["a"].by_tier["host"] == 32
    assert harness.usages["a"].load.choice == "policy_wait"  # type: ignore[union-attr]  # it loaded


def test_deadline_loads_and_gives_up():
    """The policy `deadline` loads whatever the price, but waits no longer than its deadline."""
    settings = {"load_policy": "deadline", "load_timeout_s": 0.5}
    harness = make_measured(token_s=1e-6, block_s=1.0, settings=settings)
    harness.copier.held = True
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    assert harness.core.sleep_s() == pytest.approx(0.49, abs=0.02)

    harness.run_until("a")

    assert harness.usages["a"].miss_reason == "timeout"
    assert harness.usages["a"].load.waited_s == pytest.approx(0.5, abs=0.05)  # type: ignore[union-attr]


def test_best_effort_does_not_wait_for_an_answer():
    """Lesson 45: the request has computed everything before storage answers."""
    harness = make_stored(settings={"load_policy": "best_effort"})
    harness.workers.held = True

    harness.run_until("a", make_request("a", PROMPT, max_tokens=1), max_steps=3)

    (task,) = harness.workers.tasks
    assert isinstance(task.plan, Lookup)
    usage = harness.usages["a"]
    assert usage.cached_tokens == 0
    assert usage.load is not None
    assert usage.load.waited_s == 0.0


def test_an_answer_that_cannot_make_a_load_cheaper_is_not_waited_for():
    """Lesson 45: links are so slow that everything is computed whatever storage has, so the
    request is computed before storage answers."""
    harness = make_stored()
    harness.runner.token_s, harness.copier.block_s = 1e-6, 1.0
    for family in (8, 9):  # the loop measures during the first and prices from the second on
        harness.run(make_request(f"b{family}", make_prompt(40, family=family), max_tokens=1))
    harness.workers.held = True

    harness.run_until("a", make_request("a", PROMPT, max_tokens=1), max_steps=3)

    assert any(isinstance(task.plan, Lookup) for task in harness.workers.tasks)
    usage = harness.usages["a"]
    assert usage.load is not None
    assert usage.load.waited_s == 0.0


def test_best_effort_does_not_wait_for_a_read():
    """Lesson 45: blocks read meanwhile arrive on the host, for the next request."""
    settings = {"load_policy": "best_effort", "max_num_seqs": 1}
    harness = make_stored(settings=settings, write_policy=WritePolicy.NONE)
    harness.workers.held = True
    harness.add(make_request("busy", make_prompt(9, family=3), max_tokens=10))
    harness.step()
    harness.add(make_request("a", PROMPT, max_tokens=1))
    harness.step()
    harness.workers.work_off()
    harness.run_until("busy")
    (task,) = harness.workers.tasks

    harness.run_until("a", max_steps=3)

    assert isinstance(task.plan, LoadJob)
    assert harness.usages["a"].cached_tokens == 0
    assert harness.outputs["a"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    harness.workers.work_off()
    harness.run()
    harness.core.reset_cache(("device",))
    harness.run(make_request("b", PROMPT, max_tokens=1))
    assert harness.usages["b"].by_tier["host"] == 32


def test_storage_is_asked_while_the_request_queues():
    """The answer and the bytes arrive on the host before there is room on the device."""
    harness = make_stored(settings={"max_num_seqs": 1})
    harness.add(make_request("busy", make_prompt(9, family=3), max_tokens=10))
    harness.step()
    harness.add(make_request("waits", PROMPT, max_tokens=1))
    for _ in range(5):
        harness.step()

    assert "busy" not in harness.reasons
    assert harness.cache.stats().host.cached >= 8
    harness.run()
    assert harness.usages["waits"].by_tier["storage"] == 32


def test_without_room_on_the_host_storage_is_a_miss():
    """Lesson 38: every host block is being written and stays; the blocks in storage are not
    loaded, no request waits for room, and the miss has a reason."""
    harness = make_stored(host_blocks=2, write_policy=WritePolicy.WRITE_THROUGH)
    harness.workers.held = True
    other = make_request("other", make_prompt(9, family=3), max_tokens=4)
    harness.run_until("other", replace(other, load_policy="best_effort"))
    harness.steps(3)
    (write,) = [task for task in harness.workers.tasks if isinstance(task.plan, OffloadJob)]
    assert write.claim()
    harness.workers.held = False
    harness.workers.tasks.clear()

    harness.run_until("a", make_request("a", PROMPT, max_tokens=1), max_steps=10)

    assert harness.usages["a"].miss_reason == "no_room"
    assert harness.outputs["a"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    harness.workers.run(write)
    harness.run()
    harness.check_empty()


def test_blocks_in_memory_are_not_looked_up_in_storage():
    """Lesson 25: a full hit costs storage nothing."""
    harness = make_stored()
    harness.run(make_request("a", PROMPT, max_tokens=1))
    asked = len(harness.workers.started)

    harness.run(make_request("b", PROMPT, max_tokens=1))

    assert harness.usages["b"].cached_tokens == 32
    assert len(harness.workers.started) == asked


def test_too_short_a_prompt_starts_no_lookup():
    """Lesson 65: less than a block can never be found."""
    harness = make_stored()

    harness.run(make_request("a", PROMPT[:4], max_tokens=1))

    assert not any(isinstance(plan, Lookup) for plan in harness.workers.started)
    assert harness.usages["a"].miss_reason == "too_short"


def test_a_load_takes_device_slots_only_for_requests_that_fit():
    """Lessons 31, 36: a blocked head of the queue starts no load, and evicts nothing that
    running requests use."""
    harness = make_harness()
    harness.add(make_request("long", make_prompt(40, family=2), max_tokens=20))
    harness.step()
    started = len(harness.copier.started)
    harness.add(make_request("blocked", PROMPT, max_tokens=1))
    harness.step()

    ups = [plan for plan in harness.copier.started[started:] if isinstance(plan, LoadJob)]
    assert ups == []
    harness.run()
    assert harness.outputs["blocked"] == expected_tokens(
        make_request("x", PROMPT, max_tokens=1)
    )


def test_resumed_sequences_may_load_and_are_counted_once():
    """Lessons 37, 62: coming back from the host is a hit, and does not count as a second
    query."""
    harness = Harness(num_blocks=20, host_blocks=100)
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]

    harness.run(*requests)

    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_admitted == 4
    assert any(isinstance(plan, LoadJob) for plan in harness.copier.started)
    for request in requests:
        assert harness.outputs[request.request_id] == expected_tokens(request)


def test_writes_in_flight_leave_room_for_sequences():
    """Lesson 25: writes pin at most half of the device, however many blocks are queued."""
    harness = Harness(
        num_blocks=16, host_blocks=64, write_policy=WritePolicy.WRITE_THROUGH, held=True
    )
    harness.add(make_request("a", make_prompt(50), max_tokens=4))

    for _ in range(4):
        harness.step()

    assert 0 < sum(plan.num_blocks for plan, _ in harness.copier.pending.values()) <= 8


def test_writes_keep_up_with_the_blocks_that_a_step_computes():
    """Writes are planned once per step, so a limit below one step would leave blocks unwritten."""
    harness = Harness(num_blocks=64, host_blocks=64, write_policy=WritePolicy.AUTO, held=True)
    harness.add(make_request("a", make_prompt(50), max_tokens=1))

    for _ in range(3):
        harness.step()

    assert sum(plan.num_blocks for plan, _ in harness.copier.pending.values()) == 12


@pytest.mark.parametrize(
    "settings",
    [{"load_policy": "sometimes"}, {"load_timeout_s": -1.0}, {"max_write_blocks": 0}],
)
def test_impossible_settings_are_refused(settings):
    """Impossible settings are refused before anything runs."""
    with pytest.raises(ConfigError):
        SchedulerConfig(max_model_len=100, **settings)


def test_writes_that_never_return_hold_a_bounded_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write that has timed out counts until its call returns, so no further one begins."""
    harness = Harness(
        num_blocks=32,
        host_blocks=64,
        write_policy=WritePolicy.WRITE_THROUGH,
        stored=make_storage(),
        settings={"max_write_blocks": 2},
    )
    hung: list[OffloadJob] = []

    def start(tasks: list[Any]) -> None:
        for task in tasks:
            assert task.claim()
            if isinstance(task.plan, OffloadJob):
                hung.append(task.plan)
            else:
                harness.workers.run(task)

    monkeypatch.setattr(harness.workers, "start", start)
    for family in range(4):
        prompt = make_prompt(17, family=family)
        harness.run(make_request(f"r{family}", prompt, max_tokens=1))
        harness.clock.advance(61.0)  # past the deadline of a write
        harness.steps(3)

    assert sum(plan.num_blocks for plan in hung) == 2


@pytest.mark.parametrize(("block_s", "num_blocks"), [(0.1, 2), (1.0, 1), (0.001, 8)])
def test_no_more_is_written_at_once_than_the_link_writes_in_a_quarter_of_a_second(
    block_s, num_blocks
):
    """Lesson 13: blocks that are being written cannot be evicted, so on a slow link they would
    delay admissions."""
    harness = Harness(num_blocks=64, host_blocks=64, write_policy=WritePolicy.WRITE_THROUGH)
    harness.copier.block_s = block_s
    for family in (8, 9):
        harness.run(make_request(f"b{family}", make_prompt(40, family=family), max_tokens=1))
    harness.copier.held = True

    harness.run_until("a", make_request("a", PROMPT, max_tokens=1))
    harness.step()

    jobs = [job for job, _ in harness.copier.pending.values()]
    assert sum(job.num_blocks for job in jobs) == num_blocks
