"""Contiguous buffers: which rows share them, and when their content is valid."""

import numpy as np
import pytest
import torch

from headwater.device.contiguous_kv import ContiguousKV
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.types import RequestId

NAMES = [RequestId("a"), RequestId("b")]


@pytest.fixture
def pool(llama: LoadedModel) -> KVPool:
    made = KVPool(llama, num_blocks=8, block_tokens=4)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(0)))
    return made


@pytest.fixture
def buffers(pool: KVPool) -> ContiguousKV:
    return ContiguousKV(pool, max_buffers=8, max_bytes=1 << 24)


def held_keys(buffers: ContiguousKV, pool: KVPool, buffer: int, count: int) -> torch.Tensor:
    heads = slice(buffer * pool.kv_heads, (buffer + 1) * pool.kv_heads)
    return buffers.keys[:, heads, :count]


def pool_keys(pool: KVPool, slots: list[int], count: int) -> torch.Tensor:
    keys = pool.data[slots][:, :, 0]
    return keys.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :count]


def test_a_new_buffer_is_a_copy_of_the_pool(pool: KVPool, buffers: ContiguousKV) -> None:
    """A new buffer has all layers and heads of the tokens before this step, in position order
    (lesson 22)."""
    tables = np.array([[5, 2], [7, 0]])

    placed, end = buffers.place(NAMES, tables, np.array([7, 5]))

    assert end == 2
    assert torch.equal(held_keys(buffers, pool, int(placed[0]), 6), pool_keys(pool, [5, 2], 6))
    assert torch.equal(held_keys(buffers, pool, int(placed[1]), 4), pool_keys(pool, [7, 0], 4))


def test_a_buffer_is_kept_from_step_to_step(pool: KVPool, buffers: ContiguousKV) -> None:
    """The buffer is not filled again: content that only the buffer has is still there."""
    tables = np.array([[5, 2]])
    placed, _ = buffers.place(NAMES[:1], tables, np.array([7]))
    pool.mark_written(np.array([2]))
    buffers.advance(placed, tables, np.array([7]))
    buffers.keys.fill_(3.0)

    buffers.place(NAMES[:1], tables, np.array([8]))

    assert bool((held_keys(buffers, pool, int(placed[0]), 6) == 3.0).all())


@pytest.mark.parametrize("change", ["written", "moved", "skipped"])
def test_a_buffer_that_cannot_be_proved_is_filled_again(
    pool: KVPool, buffers: ContiguousKV, change: str
) -> None:
    """A buffer is filled again after another write to a slot, with another slot, and after a
    missed step, so no wrong block is read."""
    tables = np.array([[5, 2]])
    placed, _ = buffers.place(NAMES[:1], tables, np.array([6]))
    buffers.advance(placed, tables, np.array([6]))
    buffers.keys.fill_(3.0)
    if change == "written":
        pool.mark_written(np.array([5]))
    if change == "moved":
        tables = np.array([[6, 2]])
    context = 8 if change == "skipped" else 7

    placed, _ = buffers.place(NAMES[:1], tables, np.array([context]))

    expected = pool_keys(pool, tables[0].tolist(), 6)
    assert torch.equal(held_keys(buffers, pool, int(placed[0]), 6), expected)


def test_one_long_row_among_short_ones_is_left_out(buffers: ContiguousKV) -> None:
    """Each row that is attended in buffers costs as much as the longest of them."""
    contexts = np.array([100, 90, 8000, 110, 95])

    assert buffers.choose(contexts).tolist() == [True, True, False, True, True]


def test_rows_that_do_not_fit_are_left_out(pool: KVPool) -> None:
    """The longest rows are left out first; with no memory at all there are no buffers."""
    token_bytes = pool.num_bytes // (pool.num_blocks * pool.block_tokens)

    assert not ContiguousKV(pool, max_buffers=8, max_bytes=0).choose(np.array([4, 4])).any()
    few = ContiguousKV(pool, max_buffers=8, max_bytes=600 * token_bytes)
    assert few.choose(np.array([20, 30, 40])).tolist() == [True, True, False]
    assert (
        ContiguousKV(pool, max_buffers=1, max_bytes=1 << 24).choose(np.array([9, 8])).sum() == 1
    )


def test_free_buffers_are_filled_from_the_end_when_many_rows_have_left(pool: KVPool) -> None:
    """The last rows of a large batch move to the first buffers."""
    buffers = ContiguousKV(pool, max_buffers=8, max_bytes=1 << 24)
    names = [RequestId(str(i)) for i in range(8)]
    buffers.place(names, np.tile([1], (8, 1)), np.full(8, 3))

    placed, end = buffers.place(names[6:], np.tile([1], (2, 1)), np.full(2, 4))

    assert sorted(placed.tolist()) == [0, 1]
    assert end == 2


def test_a_shared_prefix_is_in_one_buffer_until_others_need_it(
    pool: KVPool, buffers: ContiguousKV
) -> None:
    """Only a row's own blocks are copied; the prefix follows when rows no longer share it."""
    tables = np.array([[5, 2, 1], [5, 2, 3]])
    contexts = np.array([11, 11])
    placed, _ = buffers.place(NAMES, tables, contexts, shared_blocks=2)
    first, second = (int(buffer) for buffer in placed)

    assert torch.equal(held_keys(buffers, pool, first, 10), pool_keys(pool, [5, 2, 1], 10))
    own = held_keys(buffers, pool, second, 10)
    assert torch.equal(own[:, :, 8:], pool_keys(pool, [5, 2, 3], 10)[:, :, 8:])
    assert not own[:, :, :8].any()

    buffers.advance(placed, tables, contexts)
    buffers.place(NAMES, tables, contexts + 1, shared_blocks=1)

    assert torch.equal(held_keys(buffers, pool, second, 10), pool_keys(pool, [5, 2, 3], 10))
