"""A sequence gives the same tokens, however it is chunked, batched, cached and placed."""

import numpy as np
import pytest

from headwater.device.model import LoadedModel
from tests.device.driver import Driver
from tests.device.families import Reference, assert_same_tokens, prompt

COUNT = 12
WHOLE = 37


@pytest.fixture(scope="module")
def truth(llama_reference: Reference) -> tuple[list[int], list[float]]:
    return llama_reference.generate(prompt(WHOLE), COUNT)


@pytest.mark.parametrize("block_tokens", [1, 16, 64])
@pytest.mark.parametrize("contiguous_bytes", [0, 1 << 26])
def test_block_size_and_slot_order_do_not_matter(
    llama: LoadedModel,
    truth: tuple[list[int], list[float]],
    block_tokens: int,
    contiguous_bytes: int,
) -> None:
    """Blocks of any size in shuffled slots, attended alone or in buffers, give the same
    tokens."""
    driver = Driver(llama, block_tokens=block_tokens, contiguous_bytes=contiguous_bytes)
    sequence = driver.add(prompt(WHOLE))

    driver.finish(sequence, count=COUNT)

    assert_same_tokens(sequence.output, *truth)


@pytest.mark.parametrize("sizes", [(1,) * WHOLE, (16, 16, 5), (20, 17), (36, 1)])
def test_chunked_equals_whole(
    llama: LoadedModel, truth: tuple[list[int], list[float]], sizes: tuple[int, ...]
) -> None:
    """A prompt computed in chunks, aligned to blocks or not, gives the same output."""
    driver = Driver(llama)
    sequence = driver.add(prompt(WHOLE))

    for size in sizes:
        driver.step((sequence, size))
    driver.finish(sequence, count=COUNT)

    assert_same_tokens(sequence.output, *truth)


def test_a_mixed_batch_equals_separate_ones(
    llama: LoadedModel, llama_reference: Reference, truth: tuple[list[int], list[float]]
) -> None:
    """Decodes and prompt chunks give the same tokens in one packed batch, in any order of
    rows."""
    driver = Driver(llama)
    old = driver.add(prompt(WHOLE), name="old")
    new, late = (driver.add(prompt(n, seed=n), name=str(n)) for n in (50, 23))

    driver.step((old, WHOLE))
    driver.step((new, 30), (old, 1))
    driver.step((old, 1), (new, 20), (late, 10))
    driver.step((late, 13), (new, 1), (old, 1))
    driver.finish(new, old, late, count=COUNT)

    assert_same_tokens(old.output, *truth)
    assert_same_tokens(new.output, *llama_reference.generate(prompt(50, seed=50), COUNT))
    assert_same_tokens(late.output, *llama_reference.generate(prompt(23, seed=23), COUNT))


def test_a_prefix_written_by_another_row_equals_a_computed_one(
    llama: LoadedModel, truth: tuple[list[int], list[float]]
) -> None:
    """Cached equals uncached: two blocks are read from slots that another sequence filled."""
    driver = Driver(llama)
    first = driver.add(prompt(WHOLE), name="first")
    driver.step((first, WHOLE))

    second = driver.add(prompt(WHOLE), name="second", shared=first.slots[:2])
    driver.finish(second, first, count=COUNT)

    assert second.slots[:2] == first.slots[:2]
    assert_same_tokens(first.output, *truth)
    assert_same_tokens(second.output, *truth)


def test_decoded_blocks_are_a_prefix_too(
    llama: LoadedModel, llama_reference: Reference
) -> None:
    """KV computed in buffers is in the pool: a later row reads it there (lesson 41)."""
    driver = Driver(llama, block_tokens=4)
    first = driver.add(prompt(5), name="first")
    driver.finish(first, count=20)
    told = np.array(first.tokens[:18], dtype=np.int32)

    again = driver.add(told, name="again", shared=first.slots[:4])
    driver.finish(again, count=7)

    _, gaps = llama_reference.generate(told, 7)
    assert_same_tokens(again.output, first.tokens[18:25], gaps)


def test_a_name_used_again_never_meets_the_old_buffer(
    llama: LoadedModel, llama_reference: Reference
) -> None:
    """A sequence with the name, the length and the slots of one that just finished, but other
    tokens: its buffer is filled again, because its slots have been written since."""
    driver = Driver(llama, num_blocks=4)
    old = driver.add(prompt(32, seed=1), name="same")
    driver.finish(old, count=3)
    slots = list(old.slots)

    fresh = driver.add(prompt(34, seed=2), name="same")
    fresh.slots = slots
    driver.step((fresh, 34))
    driver.finish(fresh, count=5)

    other = Driver(llama)
    expected = other.add(prompt(34, seed=2), name="other")
    other.finish(expected, count=5)
    _, gaps = llama_reference.generate(prompt(34, seed=2), 5)
    assert_same_tokens(fresh.output, expected.output, gaps)


@pytest.mark.slow
def test_rows_that_come_and_go_keep_their_tokens(
    llama: LoadedModel, llama_reference: Reference
) -> None:
    """Rows of very different lengths take, leave, move and share buffers."""
    driver = Driver(llama, num_blocks=128, contiguous_bytes=1 << 22)
    sizes = [3, 150, 9, 61, 30, 12]
    rows = [driver.add(prompt(n, seed=n), name=str(n)) for n in sizes]
    random = np.random.default_rng(0)

    while todo := [row for row in rows if len(row.output) < COUNT]:
        chosen = [row for row in todo if random.random() < 0.7] or todo
        random.shuffle(chosen)
        driver.step(*((row, len(row.tokens) - row.num_computed) for row in chosen))

    for row, size in zip(rows, sizes, strict=True):
        assert_same_tokens(
            row.output, *llama_reference.generate(prompt(size, seed=size), COUNT)
        )


@pytest.mark.parametrize("num_rows", [1, 3])
def test_two_steps_in_flight_equal_one(
    llama: LoadedModel, llama_reference: Reference, num_rows: int
) -> None:
    """With depth 2 the next input is carried on the device from the previous step."""
    one, two = Driver(llama), Driver(llama, depth=2)
    prompts = [prompt(9 + i, seed=i) for i in range(num_rows)]
    plain = [one.add(tokens, name=str(i)) for i, tokens in enumerate(prompts)]

    one.finish(*plain, count=COUNT)
    carried = two.run_two_ahead(prompts, count=COUNT)

    for number, (mine, other) in enumerate(zip(carried, plain, strict=True)):
        _, gaps = llama_reference.generate(prompt(9 + number, seed=number), COUNT)
        assert_same_tokens(mine.output, other.output, gaps)
