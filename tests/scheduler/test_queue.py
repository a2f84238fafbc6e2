"""The waiting queue: its order, and that a long queue costs a step nothing."""

import sys
import tracemalloc
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.scheduler.queues import WaitingQueue
from headwater.scheduler.sequence import Sequence
from tests.scheduler.harness import Harness, make_prompt, make_request


def make_sequence(priority: int, arrival: int, num_preemptions: int) -> Sequence:
    sequence = Sequence(
        make_request(f"{priority}-{arrival}", [1, 2, 3]),
        rank=(priority, arrival),
        block_tokens=4,
        num_tokens_end=8,
        max_committed=2,
        stop_tokens=frozenset(),
    )
    sequence.num_preemptions = num_preemptions
    return sequence


PLACES = st.tuples(st.integers(-1, 1), st.integers(0, 1))


@given(st.lists(PLACES, max_size=20), st.data())
def test_the_order_is_class_then_preempted_then_arrival(places, data) -> None:
    """For any order of arrivals and departures, the queue is as if it were sorted each time."""
    queue, model = WaitingQueue(), []
    for arrival, (priority, preempted) in enumerate(places):
        sequence = make_sequence(priority, arrival, preempted)
        queue.push(sequence)
        model.append(sequence)
        if data.draw(st.booleans()):
            queue.remove(gone := data.draw(st.sampled_from(model)))
            model.remove(gone)
        model.sort(key=lambda s: (s.rank[0], s.num_preemptions == 0, s.rank[1]))

        assert list(queue) == model
        assert len(queue) == len(model)
        assert list(queue.preempted()) == [s for s in model if s.num_preemptions]
        assert queue.num_preempted == sum(s.num_preemptions for s in model)
    for sequence in model:
        queue.remove(sequence)
        with pytest.raises(ValueError, match="is not in the waiting queue"):
            queue.remove(sequence)


@given(st.lists(st.booleans(), max_size=12))
def test_the_sequence_just_returned_may_be_removed(leaves) -> None:
    """Admission iterates over the queue and removes from it; no sequence is seen twice or
    missed."""
    queue = WaitingQueue()
    everyone = [make_sequence(0, arrival, 0) for arrival in range(len(leaves))]
    for sequence in everyone:
        queue.push(sequence)

    met = []
    for sequence, leave in zip(queue, leaves, strict=False):
        met.append(sequence)
        if leave:
            queue.remove(sequence)

    assert met == everyone
    assert list(queue) == [s for s, left in zip(everyone, leaves, strict=True) if not left]


def cost_of_step(harness: Harness) -> tuple[int, int]:
    """Function calls, and the most bytes allocated, in one turn of the loop."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        harness.core.step()
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return num_calls, peak


def make_line(kind: str, num_waiting: int) -> Harness:
    """A harness with eight running sequences, and a long queue of one kind behind them."""
    places = 8 if kind == "full" else 16
    limits = {"max_num_seqs": places, "max_batched_tokens": 16, "long_prefill_tokens": 4}
    harness = Harness(num_blocks=256, settings=limits)
    harness.add(
        *(make_request(f"r{n}", make_prompt(16, family=n), max_tokens=60) for n in range(8))
    )
    harness.steps(30)
    if kind == "sharing":
        harness.add(make_request("source", make_prompt(200, family=9)))
        harness.step()
    prompt = make_prompt(200, family=9) if kind == "sharing" else make_prompt(900, family=9)
    for number in range(num_waiting):
        harness.add(make_request(f"w{number}", [*prompt, number % 40]))
    harness.step()
    return harness


@pytest.mark.parametrize("kind", ["full", "blocked", "sharing"])
def test_a_step_costs_the_same_however_many_wait(kind: str) -> None:
    """The cost of a step depends on running sequences: a queue 30 times as long is neither
    scanned nor copied, whether it waits for a place, for room, or for another sequence's
    prefix."""
    cost_of_step(make_line(kind, 10))  # the first time, objects are created that stay
    short, long = (cost_of_step(make_line(kind, count)) for count in (100, 3000))

    assert abs(long[0] - short[0]) < 100  # calls; 2900 more wait
    assert long[1] - short[1] < 8 * 1000  # bytes; a copy of the line would have 8 each


def test_a_bounded_number_of_sequences_that_wait_for_a_prefix_is_examined() -> None:
    """Beyond four for each place the queue is not examined; when their prefix is ready, all are
    served."""
    harness = make_line("sharing", 100)

    assert harness.scheduler.stats().num_prefix_waits == 64
    harness.run()

    assert len(harness.reasons) == 109
    assert set(harness.reasons.values()) == {"length"}


def test_a_full_cache_keeps_what_the_next_waiting_sequence_will_find() -> None:
    """The oldest cached blocks are those of a sequence that waits behind another one. The other
    one needs room, and gets it from blocks that no sequence waits for."""
    harness = Harness(num_blocks=32, settings={"max_num_seqs": 1})
    families = [make_prompt(17, family=number) for number in range(6)]
    for number, prompt in enumerate(families):
        harness.run(make_request(f"before {number}", prompt, max_tokens=1))
    running = make_request("running", make_prompt(17, family=6), max_tokens=4)
    large = make_request("large", make_prompt(32, family=7), max_tokens=1)
    harness.run(running, large, make_request("returns", families[0], max_tokens=1))

    assert harness.cache.stats().evicted_device > 0
    assert harness.usages["returns"].cached_tokens == 16
