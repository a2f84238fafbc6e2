"""Host and storage tiers under the whole engine: no fault changes a token or keeps a slot.

The runner's KV, the host slab and the stored blocks are real bytes, so a block that is
copied, landed or reused wrongly yields other tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache import Lookup, Promotion, TokenPath
from headwater.errors import StorageError
from headwater.scheduler.request import Request
from headwater.storage.base import StorageBackend
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.transfer.workers import Task
from headwater.types import WritePolicy
from tests.scheduler.rig import Rig, expected_tokens, make_prompt, make_request, make_storage
from tests.search import search

POLICIES = list(WritePolicy)


class FaultyStorage(MemoryStorage):
    """Loses, damages and refuses, as its dice fall: below 0.2 something goes wrong."""

    roll: Callable[[], float]

    def contains(self, runs, *, timeout_s):
        self._fail("contains")
        return super().contains(runs, timeout_s=timeout_s)

    def read(self, keys, into, *, timeout_s):
        self._fail("read")
        for key in keys:
            roll = self.roll()
            if roll < 0.1:
                self.values.pop(key, None)
            elif roll < 0.2 and key in self.values:
                value = bytearray(self.values[key])
                value[int(roll * 1e6) % len(value)] ^= 1
                self.values[key] = value
        return super().read(keys, into, timeout_s=timeout_s)

    def write(self, keys, blocks, *, parents, timeout_s):
        self._fail("write")
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def _fail(self, what):
        if self.roll() < 0.15:
            raise StorageError(f"{what} failed")


def make_faulty(roll: Callable[[], float], block_tokens: int = 4) -> FaultyStorage:
    form = BlockFormat(fingerprint=bytes(32), block_bytes=8 * block_tokens)
    storage = FaultyStorage(MemoryConfig(), form)
    storage.roll = roll
    return storage


def never() -> float:
    return 1.0


def always() -> float:
    return 0.0


@dataclass
class Play:
    """One random workload on one small engine whose executors are unreliable."""

    rig: Rig
    requests: list[Request]
    dice: random.Random
    faults: bool
    hung: list[Task] = field(default_factory=list)
    """Storage calls that have begun and do not return."""

    def run(self) -> None:
        """Until every request has ended and every executor has returned."""
        pending = list(self.requests)
        for _ in range(20_000):
            if pending and self.dice.random() < 0.3:
                self.rig.add(pending.pop(0))
            self._work()
            if self.rig.core.has_work:
                self.rig.step()
            elif not pending and not self.rig.num_waiting:
                return self._finish()
            elif self.rig.core.sleep_s() is not None and self.dice.random() < 0.2:
                self.rig.sleep()
            if self.faults and self.dice.random() < 0.01:
                self.rig.core.reset_cache()
        raise AssertionError("no end")

    def _finish(self) -> None:
        while self.rig.scheduler.stats().num_copies or self.rig.core.has_work:
            for job in list(self.rig.copier.pending):
                self.rig.copier.finish(job)
            self._return_late()
            self.rig.workers.work_off()
            self.rig.step()

    def _work(self) -> None:
        """Some jobs end, well or not; some executors scribble into what is theirs."""
        copier, dice = self.rig.copier, self.dice
        for job in list(copier.pending):
            roll = dice.random()
            if roll < 0.5:
                copier.finish(job)  # a doomed one fails
            elif self.faults and roll < 0.6:
                copier.finish(job, num_blocks=dice.randint(0, 3))
            elif self.faults and roll < 0.8:
                copier.scribble(job)
        if self.faults and dice.random() < 0.2:
            tasks = self.rig.workers.tasks
            if tasks and tasks[0].claim():
                self.hung.append(tasks.pop(0))
        if dice.random() < 0.6:
            self.rig.workers.work_off()
        if dice.random() < 0.1:
            self._return_late()

    def _return_late(self) -> None:
        for task in self.hung:
            self.rig.workers.run([task])
        self.hung.clear()


@st.composite
def plays(draw, *, faults: bool) -> Play:
    """Pools that barely hold one request, prompts that share prefixes and come back."""
    block_tokens = draw(st.sampled_from([2, 4]))
    specs = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(1, 16)),
            min_size=3,
            max_size=12,
        )
    )
    requests = [
        make_request(f"r{n}", make_prompt(length, family=family), max_tokens=most)
        for n, (family, length, most) in enumerate(specs)
    ]
    longest = max(len(r.tokens) + r.params.max_tokens - 1 for r in requests)
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    stored = draw(st.booleans())
    storage = make_faulty(dice.random if faults else never, block_tokens) if stored else None
    rig = Rig(
        num_blocks=-(-longest // block_tokens) + draw(st.integers(0, 8)),
        block_tokens=block_tokens,
        depth=draw(st.sampled_from([1, 2])),
        layerwise=draw(st.booleans()),
        host_blocks=draw(st.sampled_from([2, 8, 40])),
        write_policy=draw(st.sampled_from(POLICIES)),
        stored=storage,
        held=True,
        timeouts={
            "copy_timeout_s": 0.05,
            "read_timeout_s": 0.04,
            "write_timeout_s": 0.06,
            "lookup_timeout_s": 0.03,
        }
        if faults
        else {},
        settings={
            "max_num_seqs": draw(st.sampled_from([1, 4])),
            "max_batched_tokens": 16,
            "load_policy": draw(st.sampled_from(["priced", "best_effort", "wait", "deadline"])),
            "load_timeout_s": draw(st.sampled_from([0.0, 0.03, 1.0])),
            "max_write_blocks": draw(st.sampled_from([1, 3, 64])),
        },
    )
    if faults:
        rig.copier.dooms = lambda transfer: dice.random() < 0.15
    return Play(rig, requests, dice, faults)


def check_whole(play: Play) -> None:
    rig = play.rig
    for request in play.requests:
        assert rig.outputs[request.request_id] == expected_tokens(request)
        assert rig.reasons[request.request_id] in ("stop", "length")
    rig.check_empty()
    stats = rig.cache.stats()
    assert stats.jobs == 0
    for pool in (stats.device, stats.host):
        assert pool.free + pool.cached == pool.total
    assert rig.scheduler.stats().num_copies == 0


@pytest.mark.slow
@search(examples=150)
@given(play=plays(faults=False))
def test_tiers_change_no_token(play: Play) -> None:
    """Cached = uncached and preempted = undisturbed with lower tiers on: every write policy,
    every load policy, both depths, pools that barely hold one request."""
    play.run()

    check_whole(play)


@pytest.mark.slow
@search(examples=200)
@given(play=plays(faults=True))
def test_no_fault_changes_a_token_or_keeps_a_slot(play: Play) -> None:
    """Lessons 20, 24, 38, 44, 50: failed, partial, late and hung copies and reads, lost and
    damaged blocks, resets: every request ends with its own tokens, every slot comes back."""
    play.run()

    check_whole(play)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_host_hits_equal_recomputing(depth: int, policy: WritePolicy) -> None:
    """Each write policy: prompts that the device had to evict come back with the same tokens,
    from the host where the policy put them there."""
    rig = Rig(num_blocks=16, host_blocks=64, depth=depth, write_policy=policy)
    prompts = [make_prompt(33, family=family) for family in range(4)]

    for turn in range(4):
        for family, prompt in enumerate(prompts):
            for again in range(2):
                rig.run(make_request(f"{turn}-{family}-{again}", prompt, max_tokens=3))

    for name, tokens in rig.outputs.items():
        family = int(name.split("-")[1])
        alone = make_request("alone", prompts[family], max_tokens=3)
        assert tokens == expected_tokens(alone)
    from_host = sum(usage.by_tier["host"] for usage in rig.usages.values())
    assert (from_host > 0) == (policy is not WritePolicy.NONE)
    assert rig.core.stats().found_tokens["host"] == from_host
    rig.check_empty()


def warm(rig: Rig, prompt: list[int], *, rounds: int = 2) -> None:
    """Serve `prompt` often enough for the host to have it, then crowd it off the device."""
    for number in range(rounds):
        rig.run(make_request(f"warm{number}", prompt, max_tokens=1))
    for family in range(5, 9):
        rig.run(make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1))


def make_through(storage: StorageBackend, **options: Any) -> Rig:
    """An engine that writes everything it computes to the host and to `storage`."""
    whole: dict[str, Any] = {"num_blocks": 16, "host_blocks": 64, "stored": storage}
    return Rig(**(whole | {"write_policy": WritePolicy.WRITE_THROUGH} | options))


def make_warm(**options: Any) -> Rig:
    """An engine whose host has the 8 full blocks of `PROMPT` and whose device has none."""
    rig = Rig(num_blocks=17, host_blocks=64, **options)
    warm(rig, PROMPT)
    return rig


PROMPT = make_prompt(33)


def test_a_hit_below_the_device_counts_for_the_tier_it_was_found_in() -> None:
    """Lesson 64: the usage says host, the ledger says host, and why it was loaded."""
    rig = make_warm()
    before = rig.runner.num_tokens

    rig.run(make_request("again", PROMPT, max_tokens=1))

    usage = rig.usages["again"]
    assert usage.by_tier == {"device": 0, "host": 32, "storage": 0, "peer": 0}
    assert (usage.cached_tokens, usage.computed, usage.miss_reason) == (32, 1, None)
    assert usage.load is not None
    assert (usage.load.choice, usage.load.num_blocks, usage.load.shortfall) == (
        "unmeasured",
        8,
        None,
    )
    assert rig.runner.num_tokens == before + 1


def test_a_storage_hit_counts_for_storage() -> None:
    """Another engine on the same storage finds what this one wrote; lesson 40: writing it
    again moves nothing."""
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
    """Lesson 26: no convoy: one read, one copy, and everybody hits."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    rig = make_through(storage, num_blocks=80, settings={"max_num_seqs": 64})
    requests = [make_request(f"r{n}", PROMPT, max_tokens=2) for n in range(50)]

    rig.run(*requests)

    promotions = [p for p in rig.copier.started if isinstance(p, Promotion)]
    reads = [p for p in rig.workers.started if isinstance(p, Promotion)]
    assert (len(promotions), len(reads)) == (1, 1)
    assert all(rig.outputs[r.request_id] == expected_tokens(r) for r in requests)
    assert all(usage.by_tier["storage"] == 32 for usage in rig.usages.values())


class CountingStorage(MemoryStorage):
    """Notes how many prompts each call asks for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def contains(self, runs, *, timeout_s):
        self.asked.append(len(runs))
        return super().contains(runs, timeout_s=timeout_s)


def test_what_one_step_asks_of_storage_is_one_call() -> None:
    """Lesson 25: eight prompts that come together are one question, answered each on its own."""
    form = BlockFormat(fingerprint=bytes(32), block_bytes=32)
    storage = CountingStorage(MemoryConfig(), form)
    prompts = [make_prompt(20 + n, family=n) for n in range(8)]
    make_through(storage).run(make_request("a", prompts[0], max_tokens=1))
    make_through(storage).run(make_request("b", prompts[3][:13], max_tokens=1))
    storage.asked.clear()
    rig = make_through(storage, num_blocks=80)

    requests = [make_request(f"r{n}", prompt, max_tokens=2) for n, prompt in enumerate(prompts)]
    rig.run(*requests)

    assert storage.asked == [8]
    found = [rig.usages[r.request_id].by_tier["storage"] for r in requests]
    assert found == [16, 0, 0, 12, 0, 0, 0, 0]
    assert all(rig.outputs[r.request_id] == expected_tokens(r) for r in requests)


def test_while_a_load_is_in_flight_others_run_and_nothing_is_held() -> None:
    """Lessons 13, 45: the step does not wait for a copy; the sequence that does has no slots."""
    rig = make_warm()
    rig.copier.held = True
    rig.add(make_request("loads", PROMPT, max_tokens=1))
    rig.step()
    assert rig.cache.stats().device.moving == 8

    rig.run_until("other", make_request("other", make_prompt(9, family=3), max_tokens=4))

    assert "loads" not in rig.outputs
    assert rig.cache.stats().leases == 0
    (job,) = [job for job, (plan, _) in rig.copier.pending.items() if plan.num_blocks == 8]
    rig.copier.finish(job)
    rig.run()
    assert rig.usages["loads"].by_tier["host"] == 32


def test_only_copies_in_flight_is_no_work() -> None:
    """Lesson 15: a loop whose requests all wait for copies sleeps until one is done."""
    rig = make_warm()
    rig.copier.held = True
    rig.add(make_request("loads", PROMPT, max_tokens=1))
    rig.step()

    was_working, sleep_s = rig.core.has_work, rig.core.sleep_s()
    rig.copier.finish(next(iter(rig.copier.pending)))

    assert not was_working
    assert sleep_s == pytest.approx(5.0, abs=0.1)
    assert rig.core.has_work
    rig.run()
    assert rig.reasons["loads"] == "length"


def test_a_deadline_ends_the_wait_and_not_the_job() -> None:
    """Lessons 38, 50: the request computes; the late copy lands in its own slots, for others."""
    rig = make_warm(settings={"load_timeout_s": 0.5})
    rig.copier.held = True
    rig.add(make_request("late", PROMPT, max_tokens=1))
    rig.step()
    rig.sleep()

    while "late" not in rig.reasons:
        rig.step()

    assert rig.usages["late"].miss_reason == "timeout"
    assert rig.outputs["late"] == expected_tokens(make_request("alone", PROMPT, max_tokens=1))
    assert rig.cache.stats().device.moving == 8
    rig.copier.finish(next(iter(rig.copier.pending)))
    rig.run()
    rig.check_empty()


def test_a_timed_out_copy_that_writes_late_touches_no_reused_slot() -> None:
    """Lesson 50: its slots are quarantined until it is quiet, then they are free again."""
    rig = make_warm(timeouts={"copy_timeout_s": 0.2})
    rig.copier.held = True
    rig.add(make_request("late", PROMPT, max_tokens=1))
    rig.step()
    rig.sleep()
    rig.step()
    assert rig.cache.stats().device.quarantined == 8

    job = next(iter(rig.copier.pending))
    rig.add(make_request("busy", make_prompt(30, family=9), max_tokens=2))
    for _ in range(20):
        rig.copier.scribble(job)
        rig.step()
    assert rig.cache.stats().device.quarantined == 8
    rig.copier.finish(job)
    rig.run()

    assert rig.outputs["late"] == expected_tokens(make_request("alone", PROMPT, max_tokens=1))
    assert rig.outputs["busy"] == expected_tokens(
        make_request("alone", make_prompt(30, family=9), max_tokens=2)
    )
    assert rig.cache.stats().device.quarantined == 0
    assert rig.core.stats().links["host_to_device"].failures == {"timeout": 1}
    rig.check_empty()


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_a_failed_or_partial_load_is_computed_instead(num_blocks: int) -> None:
    """Lessons 20, 22: what arrived is used, from the first missing block on it is computed."""
    rig = make_warm()
    rig.copier.held = True
    rig.add(make_request("again", PROMPT, max_tokens=1))
    rig.step()
    rig.copier.finish(next(iter(rig.copier.pending)), num_blocks=num_blocks)
    rig.copier.held = False

    rig.run()

    usage = rig.usages["again"]
    assert rig.outputs["again"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert usage.cached_tokens in (4 * num_blocks, 32)
    if not num_blocks:
        assert usage.miss_reason == "load_failed"


@pytest.mark.parametrize("fault", ["error", "damaged", "lost", "hung"])
def test_a_storage_fault_costs_the_hit_and_nothing_else(fault: str) -> None:
    """Lessons 38, 44, 45, 63: the request is computed, and its usage says why."""
    storage = make_faulty(never)
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    rig = make_through(storage, held=fault == "hung")
    keys = rig.cache.keys(TokenPath(PROMPT), 8)
    if fault == "error":
        storage.roll = always
    elif fault == "damaged":
        storage.values[keys[2]] = bytearray(storage.values[keys[2]][:-1]) + b"?"
    rig.add(make_request("b", PROMPT, max_tokens=1))
    if fault == "lost":
        rig.step()
        storage.values.pop(keys[2])
        storage.values.pop(keys[3])
    rig.copier.held = False
    rig.run()

    assert rig.outputs["b"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    usage = rig.usages["b"]
    if fault == "error":
        assert (usage.miss_reason, usage.cached_tokens) == ("storage_failed", 0)
    elif fault == "damaged":
        assert (usage.miss_reason, usage.cached_tokens) == ("damaged", 8)
    elif fault == "hung":
        assert (usage.miss_reason, usage.cached_tokens) == ("storage_timeout", 0)


def test_a_hung_storage_read_holds_up_nobody() -> None:
    """Lessons 17, 38: a read that never returns costs its own host slots; whoever needs the
    whole device gets it."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, max_tokens=1))
    rig = make_through(storage, timeouts={"read_timeout_s": 1.0})
    rig.run(make_request("head", PROMPT[:9], max_tokens=1))
    rig.workers.held = True
    rig.add(make_request("b", PROMPT, max_tokens=1))
    rig.step()
    rig.workers.work_off()
    rig.step()
    (task,) = rig.workers.tasks
    assert not isinstance(task.plan, Lookup)
    assert task.claim()
    rig.workers.tasks.clear()

    rig.run()
    rig.run(make_request("whole", make_prompt(60, family=4), max_tokens=4))

    assert rig.outputs["b"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert rig.reasons["whole"] == "length"
    assert rig.cache.stats().host.quarantined > 0
    rig.workers.held = False
    rig.workers.run([task])
    rig.workers.work_off()
    rig.run()
    rig.check_empty()
    assert rig.cache.stats().host.quarantined == 0


def test_a_reset_with_copies_in_flight_forgets_and_releases() -> None:
    """Lesson 17: a reset waits for no worker; a copy of before only gives back what it has."""
    rig = make_warm()
    rig.copier.held = True
    rig.add(make_request("a", PROMPT, max_tokens=1))
    rig.step()
    rig.core.reset_cache()
    rig.copier.finish(next(iter(rig.copier.pending)))

    rig.run()

    assert rig.outputs["a"] == expected_tokens(make_request("x", PROMPT, max_tokens=1))
    assert rig.usages["a"].cached_tokens == 0
    rig.check_empty()


def test_an_abort_while_loading_returns_every_slot() -> None:
    """Lesson 58: the load goes on and lands for others; nothing is kept for the aborted one."""
    rig = make_warm()
    rig.copier.held = True
    request = make_request("a", PROMPT, max_tokens=1)
    rig.add(request)
    rig.step()

    rig.core.abort(request.request_id)
    rig.step()
    rig.copier.finish(next(iter(rig.copier.pending)))
    rig.copier.held = False
    rig.run(make_request("b", PROMPT, max_tokens=1))

    assert rig.reasons["a"] == "abort"
    assert rig.usages["b"].cached_tokens == 32
    rig.check_empty()


def test_a_broken_tier_does_not_keep_the_loop_busy() -> None:
    """Lesson 24: a write that failed is not tried again at once: the engine goes idle."""
    storage = make_faulty(always)
    rig = make_through(storage)

    rig.run(make_request("a", PROMPT, max_tokens=1), max_steps=50)

    failures = rig.core.stats().links["host_to_storage"].failures
    assert failures["error"] >= 1
    assert not rig.core.has_work


def test_preemption_saves_and_resumes_from_the_host() -> None:
    """Lessons 29, 30, 37: what a victim computed comes back by a hit; the request is unchanged."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    prompts = [request.tokens.copy() for request in requests]
    rig = Rig(num_blocks=20, host_blocks=100, write_policy=WritePolicy.NONE)

    rig.run(*requests)

    assert rig.scheduler.stats().num_preemptions > 0
    assert any(isinstance(plan, Promotion) for plan in rig.copier.started)
    for request, prompt in zip(requests, prompts, strict=True):
        assert rig.outputs[request.request_id] == expected_tokens(request)
        assert (request.tokens == prompt).all()
    rig.check_empty()


def test_preemption_saves_to_storage_too() -> None:
    """Lesson 29: prompt and output of a victim, whatever the write policy: another engine finds
    there more than any prompt had. Turned off, nothing is written anywhere."""
    requests = [
        make_request(f"r{n}", make_prompt(8, family=n), max_tokens=40) for n in range(4)
    ]
    written = {}
    for saves in (True, False):
        storage = make_storage()
        rig = make_through(
            storage,
            num_blocks=20,
            host_blocks=100,
            write_policy=WritePolicy.NONE,
            settings={"save_preempted": saves},
        )
        rig.run(*requests)
        assert rig.scheduler.stats().num_preemptions > 0
        written[saves] = storage.stats().blocks_written
        if saves:
            longest = max(
                storage.contains([rig.cache.keys(whole_path(rig, r), 12)], timeout_s=1)[0]
                for r in requests
            )

    assert written[True] > 0
    assert longest > 2, "no block with generated tokens was saved"
    assert written[False] == 0


def whole_path(rig: Rig, request: Request) -> TokenPath:
    """Prompt and output of a request that has ended."""
    return TokenPath(request.tokens.tolist() + rig.outputs[request.request_id])


def test_two_tenants_share_nothing_in_storage() -> None:
    """Lesson 67: another salt is another key, below the process too."""
    storage = make_storage()
    make_through(storage).run(make_request("a", PROMPT, cache_salt="x"))
    rig = make_through(storage)

    rig.run(make_request("b", PROMPT, cache_salt="y"))

    assert rig.usages["b"].cached_tokens == 0
    assert rig.usages["b"].miss_reason == "never_seen"


def test_without_a_host_tier_nothing_is_copied() -> None:
    """Lesson 28: a capacity of 0 is no tier, and no special case."""
    rig = Rig(num_blocks=16)

    rig.run(*(make_request(f"r{n}", make_prompt(30, family=n)) for n in range(4)))

    assert rig.copier.started == []
    assert rig.core.stats().links == {}


def test_a_drain_ends_what_is_being_written_and_is_bounded() -> None:
    """Lesson 59: writes in flight land before the end; one that hangs is waited for so long."""
    rig = Rig(num_blocks=64, host_blocks=64, write_policy=WritePolicy.WRITE_THROUGH, held=True)
    rig.add(make_request("a", PROMPT, max_tokens=1))
    while "a" not in rig.reasons:
        rig.step()
    assert rig.cache.stats().host.cached == 0

    rig.core.drain(0.0)
    assert rig.scheduler.num_copies > 0
    rig.core.step()
    for job in list(rig.copier.pending):
        rig.copier.finish(job)
    rig.core.drain(1.0)

    assert rig.scheduler.num_copies == 0
    assert rig.cache.stats().host.cached == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_blocks", [1, 2, 5])
def test_a_host_tier_smaller_than_what_wants_in_comes_to_rest(
    policy: WritePolicy, host_blocks: int
) -> None:
    """Lesson 19: blocks that displace each other are written once a use; then the loop sleeps."""
    rig = Rig(num_blocks=16, host_blocks=host_blocks, write_policy=policy)

    for family in range(4):
        for again in range(2):
            prompt = make_prompt(30, family=family)
            rig.run(make_request(f"{family}-{again}", prompt, max_tokens=2), max_steps=100)

    assert not rig.core.has_work
    rig.check_empty()
