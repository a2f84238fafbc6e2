"""The double can be trusted: an error in memory changes its tokens or raises."""

import numpy as np
import pytest

from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import SamplingParams
from headwater.testing.runners import EchoRunner, echo_token
from headwater.types import RequestId


def make_batch(
    tokens: list[int],
    *,
    step: int = 0,
    start: int = 0,
    table: tuple[int, ...] = (0, 1),
    carry: int = -1,
    name: str = "a",
) -> ScheduledBatch:
    """One row of one sequence, which chooses a token."""
    end = start + len(tokens)
    return ScheduledBatch(
        step=step,
        request_ids=[RequestId(name)],
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        query_start=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([end], dtype=np.int32),
        block_tables=[np.array(table)],
        sampled=np.array([0], dtype=np.int32),
        params=[SamplingParams()],
        histories=[(np.array(tokens, dtype=np.int32), 1)],
        carry=np.array([carry], dtype=np.int32),
    )


def make_runner(depth: int = 1) -> EchoRunner:
    return EchoRunner(num_blocks=8, block_tokens=4, depth=depth)


def expected(*tokens: int) -> int:
    array = np.array(tokens, dtype=np.int32)
    return echo_token(array, SamplingParams(), prompt_tokens=1, vocab_size=50_000)


def run(runner: EchoRunner, batch: ScheduledBatch) -> int:
    runner.submit(batch)
    return int(runner.collect().tokens[0])


def test_a_token_depends_on_all_that_was_written_before() -> None:
    """Chunks and the whole give the same token; another first token changes the last."""
    runner = make_runner()
    run(runner, make_batch([1, 2, 3]))

    assert run(runner, make_batch([4, 5], step=1, start=3)) == expected(1, 2, 3, 4, 5)
    assert expected(1, 2, 3, 4, 5) != expected(9, 2, 3, 4, 5)


def test_an_overwritten_block_changes_the_token() -> None:
    """A block is overwritten when it is given to another sequence too early."""
    runner = make_runner()
    run(runner, make_batch([1, 2, 3, 4, 5]))
    run(runner, make_batch([7, 8], step=1, table=(0,), name="b"))

    assert run(runner, make_batch([6], step=2, start=5)) != expected(1, 2, 3, 4, 5, 6)


def test_a_wrong_slot_raises() -> None:
    """A table in the wrong order shows impossible positions."""
    runner = make_runner()
    run(runner, make_batch([1, 2, 3, 4, 5]))

    with pytest.raises(AssertionError, match="other positions"):
        run(runner, make_batch([6], step=1, start=5, table=(1, 0)))


def test_a_carried_token_is_the_one_that_was_chosen() -> None:
    """With two steps in flight the input of the second is the output of the first."""
    runner = make_runner(depth=2)
    runner.submit(make_batch([1, 2]))
    runner.submit(make_batch([0], step=1, start=2, carry=0))

    first = int(runner.collect().tokens[0])
    second = int(runner.collect().tokens[0])

    assert (first, second) == (expected(1, 2), expected(1, 2, first))


@pytest.mark.parametrize(
    ("batch", "complaint"),
    [
        (make_batch([1], step=5), "not the next"),
        (make_batch([], step=1), "computes nothing"),
        (make_batch([7], step=1, table=(0,), name="b"), "in flight"),
    ],
)
def test_an_invalid_batch_is_refused(batch: ScheduledBatch, complaint: str) -> None:
    """Steps out of order, empty rows, and slots that another sequence still uses are
    refused."""
    runner = make_runner(depth=2)
    runner.submit(make_batch([1, 2]))

    with pytest.raises(AssertionError, match=complaint):
        runner.submit(batch)


def test_no_more_steps_than_its_depth() -> None:
    """A loop that does not collect gets an error."""
    runner = make_runner()
    runner.submit(make_batch([1, 2]))

    with pytest.raises(AssertionError, match="more than 1"):
        runner.submit(make_batch([3], step=1, start=2))
