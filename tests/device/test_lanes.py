"""Lanes: which rows share them, and when their content is trusted."""

import numpy as np
import pytest
import torch

from headwater.device.kv import KVPool
from headwater.device.lanes import ContiguousKV
from headwater.device.model import LoadedModel
from headwater.types import RequestId

NAMES = [RequestId("a"), RequestId("b")]


@pytest.fixture
def pool(llama: LoadedModel) -> KVPool:
    made = KVPool(llama, num_blocks=8, block_tokens=4)
    made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(0)))
    return made


@pytest.fixture
def lanes(pool: KVPool) -> ContiguousKV:
    return ContiguousKV(pool, max_lanes=8, max_bytes=1 << 24)


def held_keys(lanes: ContiguousKV, pool: KVPool, lane: int, count: int) -> torch.Tensor:
    heads = slice(lane * pool.kv_heads, (lane + 1) * pool.kv_heads)
    return lanes.keys[:, heads, :count]


def pool_keys(pool: KVPool, slots: list[int], count: int) -> torch.Tensor:
    keys = pool.data[slots][:, :, 0]
    return keys.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :count]


def test_a_new_lane_is_a_copy_of_the_pool(pool: KVPool, lanes: ContiguousKV) -> None:
    """All layers and heads of the tokens before this step, in position order (lesson 22)."""
    tables = np.array([[5, 2], [7, 0]])

    placed, end = lanes.place(NAMES, tables, np.array([7, 5]))

    assert end == 2
    assert torch.equal(held_keys(lanes, pool, int(placed[0]), 6), pool_keys(pool, [5, 2], 6))
    assert torch.equal(held_keys(lanes, pool, int(placed[1]), 4), pool_keys(pool, [7, 0], 4))


def test_a_lane_is_kept_from_step_to_step(pool: KVPool, lanes: ContiguousKV) -> None:
    """It is not filled again: what only the lane has is still there."""
    tables = np.array([[5, 2]])
    placed, _ = lanes.place(NAMES[:1], tables, np.array([7]))
    pool.mark_written(np.array([2]))
    lanes.advance(placed, tables, np.array([7]))
    lanes.keys.fill_(3.0)

    lanes.place(NAMES[:1], tables, np.array([8]))

    assert bool((held_keys(lanes, pool, int(placed[0]), 6) == 3.0).all())


@pytest.mark.parametrize("change", ["written", "moved", "skipped"])
def test_a_lane_that_cannot_be_proved_is_filled_again(
    pool: KVPool, lanes: ContiguousKV, change: str
) -> None:
    """Another write to a slot, another slot, or a step it did not see: never a wrong block."""
    tables = np.array([[5, 2]])
    placed, _ = lanes.place(NAMES[:1], tables, np.array([6]))
    lanes.advance(placed, tables, np.array([6]))
    lanes.keys.fill_(3.0)
    if change == "written":
        pool.mark_written(np.array([5]))
    if change == "moved":
        tables = np.array([[6, 2]])
    context = 8 if change == "skipped" else 7

    placed, _ = lanes.place(NAMES[:1], tables, np.array([context]))

    expected = pool_keys(pool, tables[0].tolist(), 6)
    assert torch.equal(held_keys(lanes, pool, int(placed[0]), 6), expected)


def test_one_long_row_among_short_ones_is_left_out(lanes: ContiguousKV) -> None:
    """Together, each row costs as much as the longest."""
    contexts = np.array([100, 90, 8000, 110, 95])

    assert lanes.choose(contexts).tolist() == [True, True, False, True, True]


def test_rows_that_do_not_fit_are_left_out(pool: KVPool) -> None:
    """The longest first; with no memory at all there are no lanes."""
    token_bytes = pool.num_bytes // (pool.num_blocks * pool.block_tokens)

    assert not ContiguousKV(pool, max_lanes=8, max_bytes=0).choose(np.array([4, 4])).any()
    few = ContiguousKV(pool, max_lanes=8, max_bytes=600 * token_bytes)
    assert few.choose(np.array([20, 30, 40])).tolist() == [True, True, False]
    assert (
        ContiguousKV(pool, max_lanes=1, max_bytes=1 << 24).choose(np.array([9, 8])).sum() == 1
    )


def test_holes_are_closed_when_many_rows_have_left(pool: KVPool) -> None:
    """The last rows of a large batch move to the first lanes."""
    lanes = ContiguousKV(pool, max_lanes=8, max_bytes=1 << 24)
    names = [RequestId(str(i)) for i in range(8)]
    lanes.place(names, np.tile([1], (8, 1)), np.full(8, 3))

    placed, end = lanes.place(names[6:], np.tile([1], (2, 1)), np.full(2, 4))

    assert sorted(placed.tolist()) == [0, 1]
    assert end == 2


def test_a_shared_prefix_is_in_one_lane_until_others_need_it(
    pool: KVPool, lanes: ContiguousKV
) -> None:
    """Only what is a row's own is copied; the rest follows when rows no longer share it."""
    tables = np.array([[5, 2, 1], [5, 2, 3]])
    contexts = np.array([11, 11])
    placed, _ = lanes.place(NAMES, tables, contexts, shared_blocks=2)
    first, second = (int(lane) for lane in placed)

    assert torch.equal(held_keys(lanes, pool, first, 10), pool_keys(pool, [5, 2, 1], 10))
    own = held_keys(lanes, pool, second, 10)
    assert torch.equal(own[:, :, 8:], pool_keys(pool, [5, 2, 3], 10)[:, :, 8:])
    assert not own[:, :, :8].any()

    lanes.advance(placed, tables, contexts)
    lanes.place(NAMES, tables, contexts + 1, shared_blocks=1)

    assert torch.equal(held_keys(lanes, pool, second, 10), pool_keys(pool, [5, 2, 3], 10))
