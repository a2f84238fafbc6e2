"""Random workloads on tiers with unreliable executors: no fault changes a token or loses a
slot.

The runner's KV, the host slab and the stored blocks are real bytes, so a block that is copied
or reused wrongly gives other tokens.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.scheduler.request import Request
from headwater.transfer.workers import Task
from headwater.types import WritePolicy
from tests.engine.tier_harness import (
    make_faulty,
    never,
)
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request
from tests.search import search

POLICIES = list(WritePolicy)


@dataclass
class RandomWorkload:
    """One random workload on one small engine whose executors are unreliable."""

    harness: Harness
    requests: list[Request]
    dice: random.Random
    faults: bool
    returns: bool = True
    """Whether hung calls return while requests run; otherwise they return after every request
    has ended."""

    hung: list[Task] = field(default_factory=list)
    """Storage calls that have begun and do not return."""

    def run(self) -> None:
        """Run until every request has ended and every executor has returned."""
        pending = list(self.requests)
        for _ in range(20_000):
            if pending and self.dice.random() < 0.3:
                self.harness.add(pending.pop(0))
            self._work()
            if self.harness.core.has_work:
                self.harness.step()
            elif not pending and not self.harness.num_waiting:
                return self._finish()
            elif self.harness.core.sleep_s() is not None and self.dice.random() < 0.2:
                self.harness.sleep()
            if self.faults and self.dice.random() < 0.01:
                self.harness.core.reset_cache()
        raise AssertionError("the requests did not end")

    def _finish(self) -> None:
        while self.harness.scheduler.stats().num_copies or self.harness.core.has_work:
            for job in list(self.harness.copier.pending):
                self.harness.copier.finish(job)
            self._return_late()
            self.harness.workers.work_off()
            self.harness.step()

    def _work(self) -> None:
        """Some jobs end, successfully or not; some executors write garbage to their targets."""
        copier, dice = self.harness.copier, self.dice
        for job in list(copier.pending):
            roll = dice.random()
            if roll < 0.5:
                copier.finish(job)  # fails if `copier.fails` chose it
            elif self.faults and roll < 0.6:
                copier.finish(job, num_blocks=dice.randint(0, 3))
            elif self.faults and roll < 0.8:
                copier.scribble(job)
        if self.faults and dice.random() < 0.2:
            tasks = self.harness.workers.tasks
            if tasks and tasks[0].claim():
                self.hung.append(tasks.pop(0))
        if dice.random() < 0.6:
            self.harness.workers.work_off()
        if self.returns and dice.random() < 0.1:
            self._return_late()

    def _return_late(self) -> None:
        for task in self.hung:
            self.harness.workers.run(task)
        self.hung.clear()


@st.composite
def workloads(draw, *, faults: bool) -> RandomWorkload:
    """Pools that barely hold one request, prompts that share prefixes and return."""
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
    harness = Harness(
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
        harness.copier.fails = lambda transfer: dice.random() < 0.15
    return RandomWorkload(harness, requests, dice, faults, returns=draw(st.booleans()))


def check_whole(workload: RandomWorkload) -> None:
    harness = workload.harness
    for request in workload.requests:
        assert harness.outputs[request.request_id] == expected_tokens(request)
        assert harness.reasons[request.request_id] in ("stop", "length")
    harness.check_empty()
    stats = harness.cache.stats()
    assert stats.jobs == 0
    for pool in (stats.device, stats.host):
        assert pool.free + pool.cached == pool.total
    assert harness.scheduler.stats().num_copies == 0


@pytest.mark.slow
@search(examples=150)
@given(workload=workloads(faults=False))
def test_tiers_change_no_token(workload: RandomWorkload) -> None:
    """With lower tiers, cached equals uncached and preempted equals undisturbed, for every
    write policy, every load policy, both depths, and pools that barely hold one request."""
    workload.run()

    check_whole(workload)


@pytest.mark.slow
@search(examples=200)
@given(workload=workloads(faults=True))
def test_no_fault_changes_a_token_or_keeps_a_slot(workload: RandomWorkload) -> None:
    """Lessons 20, 24, 38, 44, 50, 75: failed, partial and late copies, storage calls that return
    late or not before every request has ended, lost and damaged blocks, resets: every request
    ends with its own tokens, every slot comes back."""
    workload.run()

    check_whole(workload)
