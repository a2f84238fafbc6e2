"""Divides the attention of a step among programs: pieces of contexts, and tiles of chunks.

It is array arithmetic on the host; the lists are sent to the device with the step's inputs.
"""

from typing import NamedTuple

import numpy as np

from headwater.device.kernels.tiles import LARGE_TILE
from headwater.device.kv import Ints
from headwater.scheduler.batch import IntArray

PIECE_STEP = 64
PART_STEP = 128
"""Pieces of decodes begin at multiples of the first number, parts of tiles at multiples of the
second, because kernels read at most so many keys at once."""

_MIN_PIECE = 192
"""Minimum number of tokens in a piece, unless there is one KV head. A short context in more
pieces takes longer to join than it saves."""

_SPARE = 64
_SPARE_OF_ONE = 256
"""Entries of the list of pieces in addition to one per row; the second number is for a model
with one KV head. All rows together have no more pieces than the list has entries.
"""


_PROGRAMS = 512
_PAIR_PROGRAMS = 128
"""Number of programs that keep the device busy; the second number is for the kernel of pairs of
heads, which has one program per processor."""

_MIN_PART_KEYS = 512
"""Minimum number of keys in a part."""

MAX_PARTS = 16
"""Maximum number of parts of a tile."""

_MIN_HOPPER_PROGRAMS = 96
_MIN_HOPPER_SCORES = 1 << 19
"""The Hopper kernel is used from this number of tiles on, about one per processor, and from
this product of queries and keys on, summed over all rows.
"""


class Pieces(NamedTuple):
    """The content of `DecodeWork`, on the host."""

    piece: int
    work_row: IntArray
    work_start: IntArray
    row_work: IntArray


def num_entries(num_rows: int, kv_heads: int) -> int:
    """Entries of a list for this many rows. A captured graph has a program for each entry and
    KV head. With one KV head there are more entries, because otherwise processors would be
    idle."""
    return num_rows + (_SPARE_OF_ONE if kv_heads == 1 else _SPARE)


def split_contexts(contexts: Ints, num_rows: int, kv_heads: int) -> Pieces:
    """Cut contexts into pieces of one size, as small as the list for `num_rows` allows."""
    room = num_entries(num_rows, kv_heads)
    total = int(contexts.sum())
    # A row has at most one piece more than its share, so this always fits.
    piece = max(-(-total // max(room - len(contexts), 1)), 1)
    least = PIECE_STEP if kv_heads == 1 else _MIN_PIECE
    piece = max(-(-piece // PIECE_STEP) * PIECE_STEP, least)
    counts = -(-contexts // piece)
    ends = np.cumsum(counts)
    used = int(ends[-1]) if len(ends) else 0
    work_row = np.full(room, -1, dtype=np.int32)
    work_start = np.zeros(room, dtype=np.int32)
    rows = np.repeat(np.arange(len(contexts)), counts)
    work_row[:used] = rows
    # The number of an entry minus that of its row's first entry is the number of the piece.
    work_start[:used] = (np.arange(used) - (ends - counts)[rows]) * piece
    # Rows that only pad a graph get empty ranges at the end of the used entries.
    row_work = np.full(num_rows + 1, used, dtype=np.int32)
    row_work[0] = 0
    row_work[1 : len(contexts) + 1] = ends
    return Pieces(piece, work_row, work_start, row_work)


class Tiles(NamedTuple):
    """The content of `ChunkWork`, on the host, by the position of the first query in its
    row."""

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
    has_pairs: bool = False,
) -> Tiles:
    """Tiles of the rows from `first_row` on. `counts` has the number of queries of each row,
    `contexts` the number of its tokens including earlier ones. If there are few tiles, each is
    cut into parts, so that every processor has work. `has_hopper_kernel` means that the device
    has a kernel for many tiles, `has_pairs` that it has one for parts of pairs of heads."""
    each = -(-counts // tile)
    ends = np.cumsum(each)
    rows = np.repeat(np.arange(len(counts)), each)
    # As for pieces: the number of a tile in its row, times its size.
    starts = (np.arange(len(rows)) - (ends - each)[rows]) * tile
    # By position of the first query, and so by the number of keys that a tile sees: kernels
    # start with the last ones.
    order = np.argsort((contexts - counts)[rows] + starts, kind="stable")
    rows, starts = rows[order], starts[order]
    programs = len(rows) * heads
    use_hopper = (
        has_hopper_kernel
        and tile == LARGE_TILE
        and programs >= _MIN_HOPPER_PROGRAMS
        and int(counts @ contexts) >= _MIN_HOPPER_SCORES
    )
    num_parts = num_parts_of(programs, contexts, has_pairs=has_pairs)
    part = -(-contexts // (num_parts * PART_STEP)) * PART_STEP
    return Tiles(
        (rows + first_row).astype(np.int32),
        starts.astype(np.int32),
        use_hopper,
        num_parts,
        part[rows].astype(np.int32),
    )


def num_parts_of(programs: int, contexts: Ints, *, has_pairs: bool) -> int:
    """Parts of each tile, for this many tiles over all heads."""
    longest = int(contexts.max()) if len(contexts) else 0
    wanted = (_PAIR_PROGRAMS * 2 if has_pairs else _PROGRAMS) // max(programs, 1)
    num_parts = max(min(wanted, longest // _MIN_PART_KEYS, MAX_PARTS), 1)
    # Powers of two, because each number of parts is a separate kernel.
    return 1 << (num_parts.bit_length() - 1)
