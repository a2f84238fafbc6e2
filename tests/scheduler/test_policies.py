"""The small decisions, one by one: queue order, admission, growth, victims, budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.scheduler.admission import admits
from headwater.scheduler.batch import StepBudget
from headwater.scheduler.blocks import GrowthEstimate
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.queues import SequenceTable, WaitingQueue
from headwater.scheduler.sequence import Sequence, SequenceState
from tests.scheduler.harness import make_prompt, make_request


def make_sequence(
    arrival: int,
    *,
    priority: int = 0,
    num_preemptions: int = 0,
    prompt: int = 8,
    most: int = 100,
) -> Sequence:
    """A sequence that waits."""
    sequence = Sequence(
        make_request(f"s{arrival}", make_prompt(prompt), max_tokens=most),
        rank=(priority, arrival),
        block_tokens=4,
        num_tokens_end=prompt + most,
        max_committed=100,
    )
    sequence.num_preemptions = num_preemptions
    return sequence


def choose_victim(decoding: list[Sequence]) -> Sequence:
    """The victim among sequences that all decode."""
    table = SequenceTable()
    for sequence in decoding:
        table.enter(sequence)
        table.move(sequence, SequenceState.DECODE)
    return table.choose_victim()


def test_the_queue_is_by_class_then_preempted_then_arrival() -> None:
    """Preempted sequences go to the front of their class, the oldest of them first."""
    places = [(1, 5, 0), (0, 4, 0), (0, 3, 0), (1, 2, 1), (0, 1, 2), (0, 6, 1)]
    queue = WaitingQueue()
    for priority, arrival, preemptions in places:
        queue.push(make_sequence(arrival, priority=priority, num_preemptions=preemptions))

    assert [s.rank for s in queue] == [(0, 1), (0, 6), (0, 3), (0, 4), (1, 2), (1, 5)]
    assert (len(queue), queue.num_preempted) == (6, 3)


def test_removing_takes_exactly_that_sequence() -> None:
    """Any sequence can leave from any position; an unknown one is an error."""
    queue = WaitingQueue()
    sequences = [make_sequence(arrival, num_preemptions=arrival % 2) for arrival in range(5)]
    for sequence in sequences:
        queue.push(sequence)

    queue.remove(sequences[2])
    queue.remove(sequences[3])

    assert list(queue) == [sequences[1], sequences[0], sequences[4]]
    assert queue.num_preempted == 1
    with pytest.raises(ValueError, match="s2 is not in the waiting queue"):
        queue.remove(sequences[2])


@pytest.mark.parametrize(
    ("needed", "available", "growth", "admitted"),
    [(5, 10, 5, True), (5, 10, 6, False), (10, 10, 0, True), (11, 10, 0, False)],
)
def test_admission_leaves_room_for_growth(
    needed: int, available: int, growth: int, admitted: bool
) -> None:
    """Lesson 36: room that running sequences will need is kept for them."""
    assert admitted == admits(
        num_needed=needed, num_available=available, num_growth=growth, num_running=1
    )


@given(needed=st.integers(0, 100), pool=st.integers(0, 100), growth=st.integers(0, 1000))
def test_admission_makes_progress_when_nothing_runs(
    needed: int, pool: int, growth: int
) -> None:
    """The head is admitted if it fits the pool at all, whatever growth is expected."""
    alone = admits(num_needed=needed, num_available=pool, num_growth=growth, num_running=0)

    assert alone == (needed <= pool)


def test_the_victim_is_the_newest() -> None:
    """Lesson 36: arrival decides, whatever the order of admission was."""
    decoding = [make_sequence(arrival) for arrival in (3, 9, 1)]

    assert choose_victim(decoding).rank == (0, 9)


def test_the_victim_is_the_lowest_priority_before_the_newest() -> None:
    """Lesson 36: a greater number is a lower priority; age decides among equals."""
    decoding = [make_sequence(a, priority=p) for a, p in ((9, 0), (1, 2), (5, 2), (7, 1))]

    assert choose_victim(decoding).rank == (2, 5)


def test_growth_is_learned_from_finished_outputs() -> None:
    """The mean follows observations, quickly at first, and later follows a change."""
    growth = GrowthEstimate(4, 128)
    for _ in range(10):
        growth.observe(20)
    assert growth.mean_tokens == pytest.approx(20)

    for _ in range(400):
        growth.observe(200)

    assert growth.mean_tokens == pytest.approx(200, rel=0.02)


def test_caution_is_raised_by_preemption_and_decays_otherwise() -> None:
    """Lesson 36: admission becomes more careful after a preemption, and returns to normal step
    by step."""
    growth, sequences = GrowthEstimate(4, 128), [make_sequence(0, most=10_000)]
    calm = growth.num_blocks(sequences)
    growth.raise_caution()
    alarmed = growth.num_blocks(sequences)
    for _ in range(1000):
        growth.lower_caution()
    settled = growth.num_blocks(sequences)
    for _ in range(10):
        growth.raise_caution()
    bounded = growth.num_blocks(sequences)

    assert settled < calm < alarmed < bounded <= 8 * settled + 1


@given(
    prompt=st.integers(1, 50),
    most=st.integers(1, 50),
    lengths=st.lists(st.integers(1, 500), max_size=5),
    alarms=st.integers(0, 5),
)
def test_growth_never_exceeds_what_a_sequence_may_need(
    prompt: int, most: int, lengths: list[int], alarms: int
) -> None:
    """A sequence and its reserve fit together into any pool that can hold the sequence at its
    longest."""
    growth = GrowthEstimate(4, 128)
    for length in lengths:
        growth.observe(length)
    for _ in range(alarms):
        growth.raise_caution()
    sequence = make_sequence(0, prompt=prompt, most=most)

    blocks = growth.num_blocks([sequence])

    assert 0 <= blocks + sequence.num_blocks_wanted <= -(-(prompt + most) // 4)


def test_a_chunk_takes_what_the_step_has() -> None:
    """A chunk is bounded by the rest of the prompt, the rest of the step, and the longest
    chunk."""
    budget = StepBudget(num_tokens=12, num_places=3, max_chunk=6)

    sizes = [budget.spend_chunk(make_sequence(0, prompt=p)).num_tokens for p in (4, 30, 30)]

    assert sizes == [4, 6, 2]
    assert not budget.has_room


def test_a_step_budget_without_places_is_full() -> None:
    """Tokens alone do not let a new sequence start."""
    budget = StepBudget(num_tokens=10, num_places=1)
    assert budget.has_room

    budget.spend_place()

    assert not budget.has_room


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"max_num_seqs": 8, "max_batched_tokens": 7},
        {"policy": "random"},
        {"long_prefill_tokens": 0},
        {"max_passes": -1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    """Impossible settings are refused before anything runs, with a message that names the
    setting."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerConfig(**{"max_model_len": 100, **wrong})  # type: ignore[arg-type]
