"""Division of a step's attention: every key of every row once, within the size of the list."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.device.gpu.work import PIECE_STEP, num_entries, split_contexts, tiles

contexts_of = st.lists(st.integers(1, 40_000), min_size=1, max_size=70)


@given(contexts_of, st.integers(0, 20), st.sampled_from([1, 8]))
def test_pieces_cover_each_row_once(contexts: list[int], absent: int, kv_heads: int) -> None:
    """Pieces are in order, without gap or overlap; unused rows have none."""
    size = len(contexts) + absent
    found = split_contexts(np.array(contexts), size, kv_heads)

    assert len(found.work_row) == len(found.work_start) == num_entries(size, kv_heads)
    assert found.piece % PIECE_STEP == 0
    for row, context in enumerate(contexts):
        mine = slice(found.row_work[row], found.row_work[row + 1])
        assert (found.work_row[mine] == row).all()
        assert found.work_start[mine].tolist() == list(range(0, context, found.piece))
    used = found.row_work[len(contexts)]
    assert (found.row_work[len(contexts) :] == used).all()
    assert (found.work_row[used:] == -1).all()


def test_equal_rows_are_cut_into_few_pieces() -> None:
    """One sequence is cut to keep the device busy; many are not cut at all."""
    assert split_contexts(np.array([1024]), 1, 8).piece == 192
    assert split_contexts(np.full(32, 1024), 32, 8).piece == 512
    assert split_contexts(np.full(256, 1024), 256, 8).piece >= 1024
    assert split_contexts(np.full(32, 1024), 32, 1).piece == 128


@pytest.mark.parametrize(
    ("rows", "context", "piece", "used"),
    [
        (1, 1024, 64, 16),
        (1, 32768, 128, 256),
        (32, 1040, 192, 192),
        (48, 8192, 1664, 240),  # as small as the list allows, they would be 288
        (96, 8192, 1664, 480),
        (128, 1024, 512, 256),
        (600, 1024, 1024, 600),
    ],
)
def test_pieces_of_one_head_fill_waves(rows: int, context: int, piece: int, used: int) -> None:
    """An H200 computes 264 programs at a time: neither a few more pieces than that, nor many
    small ones."""
    found = split_contexts(np.full(rows, context), rows, 1)

    assert (found.piece, int(found.row_work[-1])) == (piece, used)


def test_a_step_without_decodes_has_no_pieces() -> None:
    """The list exists also if only chunks are computed."""
    found = split_contexts(np.zeros(0, dtype=np.int64), 1, 1)

    assert found.piece == PIECE_STEP
    assert (found.work_row == -1).all()


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 30_000)), min_size=1, max_size=20),
    st.sampled_from([32, 64, 128]),
    st.integers(0, 5),
    st.booleans(),
)
def test_tiles_cover_each_query_and_their_parts_each_key(
    chunks: list[tuple[int, int]], tile: int, first_row: int, has_hopper_kernel: bool
) -> None:
    """Parts reach the last key of the longest row, and only few tiles are cut; tiles that see
    more keys come later. Without the Hopper kernel, `use_hopper` is never set."""
    counts = np.array([count for count, _ in chunks])
    contexts = counts + np.array([prefix for _, prefix in chunks])

    found = tiles(
        counts,
        contexts,
        first_row=first_row,
        tile=tile,
        heads=32,
        has_hopper_kernel=has_hopper_kernel,
    )

    for row, count in enumerate(counts.tolist()):
        mine = found.row == row + first_row
        assert found.start[mine].tolist() == list(range(0, count, tile))
        assert (found.part_keys[mine] * found.num_parts >= contexts[row]).all()
    before = (contexts - counts)[found.row - first_row] + found.start
    assert (np.diff(before) >= 0).all()
    assert has_hopper_kernel or not found.use_hopper
    assert found.num_parts & (found.num_parts - 1) == 0
    assert found.num_parts == 1 or len(found.row) * 32 * found.num_parts <= 512


def test_long_prompts_and_prefixes_use_the_hopper_kernel() -> None:
    """Long prompts and long prefixes give enough tiles; a short chunk or a short context does
    not."""
    for count, context, use_hopper in (
        (32768, 32768, True),
        (2048, 2048, True),
        (512, 8192, True),
        (512, 512, False),
        (128, 65536, False),
    ):
        found = tiles(
            np.array([count]), np.array([context]), first_row=0, tile=128, heads=32,
            has_hopper_kernel=True,
        )  # fmt: skip
        assert found.use_hopper is use_hopper
