"""TorchRunner: the results of steps, in order, whatever else is in the batch."""

import pytest

from headwater.device.model import LoadedModel, load
from headwater.device.runner import TorchRunner
from headwater.errors import ConfigError, InvariantError
from headwater.scheduler.request import SamplingParams
from tests.device.driver import Driver
from tests.device.families import prompt

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)


def test_a_seeded_row_gives_the_same_tokens_in_any_batch(llama: LoadedModel) -> None:
    """Randomness depends on seed and position: batching, chunking and other rows change
    nothing."""
    alone, crowd = Driver(llama), Driver(llama)
    single = alone.add(prompt(20), params=SEEDED)
    rows = [
        crowd.add(prompt(20), name="same", params=SEEDED),
        crowd.add(prompt(20), name="other seed", params=SamplingParams(seed=8)),
        crowd.add(prompt(33, seed=3), name="greedy"),
    ]

    alone.finish(single, count=12)
    crowd.step((rows[0], 7), (rows[2], 33))
    crowd.finish(*rows, count=12)

    assert rows[0].output == single.output
    assert rows[1].output != single.output


def test_penalties_count_a_carried_token(llama: LoadedModel) -> None:
    """With two steps in flight, the token just sampled is part of the history, although the
    scheduler does not know it yet."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    one, two = Driver(llama), Driver(llama, depth=2)
    plain, carried = one.add(prompt(8), params=params), two.add(prompt(8), params=params)

    one.finish(plain, count=20)
    two.submit((carried, 8))
    for _ in range(19):
        two.submit((carried, 1))
        two.collect()
    two.collect()

    assert carried.output == plain.output


def test_a_step_that_samples_nothing_returns_nothing(llama: LoadedModel) -> None:
    """A first chunk samples no token, and its result says so."""
    driver = Driver(llama)
    sequence = driver.add(prompt(20))

    result = driver.step((sequence, 10))

    assert len(result.tokens) == 0
    assert result.logprobs == []


def test_logprobs_are_of_the_rows_that_asked(llama: LoadedModel) -> None:
    """One row asks for log-probabilities, the row beside it does not."""
    driver = Driver(llama)
    quiet = driver.add(prompt(5), name="quiet")
    asking = driver.add(
        prompt(6), name="asking", params=SamplingParams(temperature=0.0, logprobs=2)
    )

    result = driver.step((quiet, 5), (asking, 6))

    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.logprobs[1].top_ids[0] == result.tokens[1]
    assert result.logprobs[1].rank == 1


def test_results_come_in_the_order_of_submission(llama: LoadedModel) -> None:
    """Step numbers are returned as given; closing twice is safe."""
    driver = Driver(llama, depth=2)
    sequence = driver.add(prompt(6))
    driver.submit((sequence, 6))
    driver.submit((sequence, 1))

    assert [driver.collect().step, driver.collect().step] == [0, 1]
    driver.runner.close()
    driver.runner.close()


def test_a_carry_without_a_source_row_raises(llama: LoadedModel) -> None:
    """A wrong batch is a bug and stops the engine instead of inventing a token."""
    batch = Driver(llama)._batch([(Driver(llama).add(prompt(3)), 3)])
    batch.carry[0] = 0

    with pytest.raises(InvariantError, match="nothing to carry"):
        Driver(llama).runner.submit(batch)


def test_an_impossible_depth_is_refused(llama: LoadedModel) -> None:
    """A runner has one step in flight, or two."""
    with pytest.raises(ConfigError, match="1 or 2"):
        TorchRunner(
            llama,
            num_blocks=1,
            block_tokens=16,
            max_num_seqs=1,
            max_batched_tokens=16,
            depth=3,
        )


def test_an_unknown_dtype_is_refused(llama: LoadedModel) -> None:
    """The message lists what is known."""
    with pytest.raises(ConfigError, match="bfloat16"):
        load(llama.model_dir, dtype="int3")


@pytest.mark.slow
def test_a_half_precision_model_runs(llama: LoadedModel) -> None:
    """KV and arithmetic may be in bfloat16, for rows attended alone and in buffers."""
    model = load(llama.model_dir, dtype="bfloat16")
    driver = Driver(model)
    rows = [driver.add(prompt(n), name=str(n)) for n in (20, 30)]

    driver.finish(*rows, count=4)

    assert model.token_bytes * 2 == llama.token_bytes
    assert all(len(row.output) == 4 for row in rows)
