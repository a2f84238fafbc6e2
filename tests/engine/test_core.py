"""The loop: steps in flight, scheduling time, the snapshot, the end."""

import pytest

from headwater.clock import VirtualClock
from headwater.engine.core import EngineCore
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.testing.runners import EchoRunner
from tests.scheduler.harness import Harness, make_prompt, make_request


class SlowRunner(EchoRunner):
    """Each collected step takes a second."""

    clock: VirtualClock

    def collect(self) -> StepResult:
        self.clock.advance(1.0)
        return super().collect()


class TickingClock(VirtualClock):
    """Every call takes a millisecond, so that scheduling takes time too."""

    def now(self) -> float:
        self.advance(0.001)
        return super().now()


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_are_in_flight_as_the_runner_allows(depth: int) -> None:
    """Depth 2 submits the next step before it collects the last; depth 1 never does."""
    harness = Harness(depth=depth)
    harness.add(make_request("a", make_prompt(5), max_tokens=6))
    in_flight = []

    while harness.core.has_work:
        harness.step()
        in_flight.append(harness.scheduler.num_in_flight)

    assert max(in_flight) == depth - 1
    assert in_flight[-1] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_with_nothing_to_submit_collects_what_is_in_flight(depth: int) -> None:
    """The last tokens are delivered although no batch follows them."""
    harness = Harness(depth=depth)
    harness.add(make_request("a", make_prompt(5), max_tokens=1))

    harness.steps(depth)

    assert harness.reasons == {"a": "length"}
    assert not harness.core.has_work


def test_without_work_a_step_does_nothing() -> None:
    """Nothing is submitted or collected; the caller should wait instead."""
    harness = Harness()

    assert not harness.core.has_work
    assert harness.core.step() == []
    assert harness.batches == []


def test_an_abort_is_reported_in_the_next_step() -> None:
    """An abort is reported also when nothing runs: has_work stays true until then."""
    harness = Harness()
    request = make_request("a", make_prompt(5))
    harness.add(request)
    harness.core.abort(request.request_id)

    assert harness.core.has_work
    (output,) = harness.core.step()

    assert (output.finish_reason, output.tokens, output.usage) == ("abort", [], None)
    assert not harness.core.has_work


def test_time_spent_deciding_is_measured_apart() -> None:
    """Scheduling and applying results count; waiting for the runner does not."""
    harness = Harness()
    clock = TickingClock()
    runner = SlowRunner(num_blocks=harness.num_blocks, block_tokens=harness.block_tokens)
    runner.clock = clock
    core = EngineCore(harness.scheduler, runner, clock)
    core.add(make_request("a", make_prompt(5), max_tokens=10))

    while core.has_work:
        core.step()

    stats = core.stats()
    assert stats.decide_s == pytest.approx(10 * 0.002)
    assert stats.step_s == pytest.approx(10 * 1.003)


def test_the_snapshot_has_every_owner_in_plain_numbers() -> None:
    """The snapshot has running and waiting sequences, tiers and the ledger: what dashboard and
    metrics show."""
    harness = Harness(num_blocks=20, settings={"max_num_seqs": 1, "max_batched_tokens": 64})
    harness.run(make_request("warm", make_prompt(12), max_tokens=1))
    harness.add(make_request("a", make_prompt(13)), make_request("b", make_prompt(4)))
    harness.steps(2)
    harness.core.pause()

    stats = harness.core.stats()

    assert (stats.num_running, stats.num_waiting, stats.is_paused) == (1, 1, True)
    assert (stats.num_steps, stats.num_admitted, stats.num_preemptions) == (3, 2, 0)
    assert (stats.queries, stats.query_tokens) == (2, 25)
    assert stats.found_tokens == {"device": 12, "host": 0, "storage": 0}
    assert stats.misses == {"never_seen": 1}
    device = stats.tiers["device"]
    assert (device.num_blocks, device.free, device.held, device.cached) == (20, 16, 1, 3)
    assert device.evictable == 0


def test_closing_closes_the_runner() -> None:
    """Closing the core twice is safe."""
    harness = Harness()

    harness.core.close()
    harness.core.close()

    assert harness.runner.closed


def test_a_failing_runner_is_not_hidden() -> None:
    """The runner's error reaches the caller of the loop, which ends the engine."""

    class Broken(EchoRunner):
        def submit(self, batch: ScheduledBatch) -> None:
            raise RuntimeError("the device is gone")

    harness = Harness()
    core = EngineCore(harness.scheduler, Broken(num_blocks=64, block_tokens=4), harness.clock)
    core.add(make_request("a", make_prompt(5)))

    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
