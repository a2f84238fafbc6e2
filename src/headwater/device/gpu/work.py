"""Shares a step's attention out among programs: pieces of contexts, and tiles of chunks.

Arithmetic over whole arrays, on the host; the lists go to the device with the step's inputs.
"""

from typing import NamedTuple

import numpy as np

from headwater.device.kernels.tiles import LARGE_TILE
from headwater.device.kv import Ints
from headwater.scheduler.batch import IntArray

PIECE_STEP = 64
"""Pieces and parts begin at multiples of this: kernels read as many keys in a turn, or half."""

_SPARE = 64
_SPARE_OF_ONE = 256
"""Entries beyond one a row; with a single KV head. Rows are cut so that they do not need more."""


_PROGRAMS = 512
_MIN_PART_KEYS = 512
MAX_PARTS = 16
"""Programs that keep the device busy; fewest keys, and most parts, that a tile is cut into."""

_MIN_HOPPER_PROGRAMS = 96
_MIN_HOPPER_SCORES = 1 << 19
"""What is called many: a tile for almost every processor; and queries times keys, of all rows."""


class Pieces(NamedTuple):
    """What `DecodeWork` says, still on the host."""

    piece: int
    work_row: IntArray
    work_start: IntArray
    row_work: IntArray


def num_entries(num_rows: int, kv_heads: int) -> int:
    """Entries of a list for so many rows; a captured graph has a program for each of them and each
    KV head. With one KV head there are more entries, or processors would have nothing to do."""
    return num_rows + (_SPARE_OF_ONE if kv_heads == 1 else _SPARE)


def split_contexts(contexts: Ints, num_rows: int, kv_heads: int) -> Pieces:
    """Cut contexts into pieces of one size, as small as the list for `num_rows` has room for."""
    room = num_entries(num_rows, kv_heads)
    total = int(contexts.sum())
    # A row has at most one piece more than its share, so this always fits.
    piece = max(-(-total // max(room - len(contexts), 1)), 1)
    piece = -(-piece // PIECE_STEP) * PIECE_STEP
    counts = -(-contexts // piece)
    ends = np.cumsum(counts)
    used = int(ends[-1]) if len(ends) else 0
    work_row = np.full(room, -1, dtype=np.int32)
    work_start = np.zeros(room, dtype=np.int32)
    rows = np.repeat(np.arange(len(contexts)), counts)
    work_row[:used] = rows
    work_start[:used] = (np.arange(used) - (ends - counts)[rows]) * piece
    row_work = np.full(num_rows + 1, used, dtype=np.int32)
    row_work[0] = 0
    row_work[1 : len(contexts) + 1] = ends
    return Pieces(piece, work_row, work_start, row_work)


class Tiles(NamedTuple):
    """What `ChunkWork` says, still on the host; by the place of their first query in its row."""

    row: IntArray
    start: IntArray
    use_hopper: bool
    num_parts: int
    part_keys: IntArray


def tiles(
    counts: Ints,
    contexts: Ints,
    *,
    first_row: int,
    tile: int,
    heads: int,
    has_hopper_kernel: bool,
) -> Tiles:
    """Tiles of rows from `first_row` on with so many queries and tokens in all.

    Few tiles are cut into parts, as many as give every processor work. `has_hopper_kernel` says that
    the device has a kernel for many.
    """
    each = -(-counts // tile)
    ends = np.cumsum(each)
    rows = np.repeat(np.arange(len(counts)), each)
    starts = (np.arange(len(rows)) - (ends - each)[rows]) * tile
    order = np.argsort((contexts - counts)[rows] + starts, kind="stable")
    rows, starts = rows[order], starts[order]
    programs = len(rows) * heads
    use_hopper = (
        has_hopper_kernel
        and tile == LARGE_TILE
        and programs >= _MIN_HOPPER_PROGRAMS
        and int(counts @ contexts) >= _MIN_HOPPER_SCORES
    )
    num_parts = _num_parts(programs, contexts)
    part = -(-contexts // (num_parts * PIECE_STEP)) * PIECE_STEP
    return Tiles(
        (rows + first_row).astype(np.int32),
        starts.astype(np.int32),
        use_hopper,
        num_parts,
        part[rows].astype(np.int32),
    )


def _num_parts(programs: int, contexts: Ints) -> int:
    longest = int(contexts.max()) if len(contexts) else 0
    wanted = _PROGRAMS // max(programs, 1)
    num_parts = max(min(wanted, longest // _MIN_PART_KEYS, MAX_PARTS), 1)
    # Powers of two: each number of parts is a kernel of its own.
    return 1 << (num_parts.bit_length() - 1)
