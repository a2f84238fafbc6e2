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
"""Pieces of decodes begin at multiples of the first number, and parts of tiles at multiples of
the second: the kernels read up to that many keys at once."""

_MIN_PIECE = 192
"""Minimum number of tokens in a piece, unless there is one KV head. A short context in more
pieces takes longer to join than it saves."""

_SPARE = 64
_SPARE_OF_ONE = 256
"""Entries of the list of pieces in addition to one per row; the second number is for a model
with one KV head. All rows together have no more pieces than the list has entries.
"""

_FEW_ROWS = 64
"""With one KV head and more rows than this, the list has twice as many spare entries, because
equal rows often fill two waves better than one."""

_WAVE = 264
"""Programs of a model with one KV head that an H200 computes at the same time, two on each
processor. When they are done, the next wave begins, also if it has only a few programs."""

_PIECE_COST = 192
"""How many tokens a program could attend in the time that it needs in addition to its keys: to
start, and to leave its result. An estimate."""

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
    if kv_heads > 1:
        return num_rows + _SPARE
    return num_rows + _SPARE_OF_ONE * (1 if num_rows <= _FEW_ROWS else 2)


def split_contexts(contexts: Ints, num_rows: int, kv_heads: int) -> Pieces:
    """Cut contexts into pieces of one size, within the list for `num_rows`: as small as it
    allows, or with one KV head so that they fill waves of programs."""
    room = num_entries(num_rows, kv_heads)
    if kv_heads == 1:
        piece = _piece_in_waves(contexts, room)
    else:
        piece = max(_large_enough(contexts, room), _MIN_PIECE)
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


def _large_enough(contexts: Ints, most: int) -> int:
    """A piece size that gives at most `most` pieces: a row has at most one piece more than its
    share."""
    share = -(-int(contexts.sum()) // max(most - len(contexts), 1))
    return max(-(-share // PIECE_STEP), 1) * PIECE_STEP


def _piece_in_waves(contexts: Ints, room: int) -> int:
    """The piece size, with at most `room` pieces, for which the number of waves multiplied by the
    tokens of a piece is smallest."""
    best, least = 0, 0
    total = int(contexts.sum())
    for waves in range(1, -(-room // _WAVE) + 1):
        most = min(waves * _WAVE, room)
        # Even pieces without any remainder would take longer than the best so far.
        if best and waves * (total / most + _PIECE_COST) >= least:
            continue
        if most >= len(contexts):
            piece = _smallest_piece(contexts, most)
            cost = waves * (piece + _PIECE_COST)
            if not best or cost < least:
                best, least = piece, cost
    return best


def _smallest_piece(contexts: Ints, most: int) -> int:
    """The smallest piece size that gives at most `most` pieces, which is not less than the
    number of rows."""
    steps = -(-contexts // PIECE_STEP)
    longest = int(steps.max()) if len(steps) else 1
    high = min(_large_enough(contexts, most) // PIECE_STEP, longest)
    low = min(max(int(steps.sum()) // most, 1), high)
    while low < high:
        middle = (low + high) // 2
        if int((-(-steps // middle)).sum()) <= most:
            high = middle
        else:
            low = middle + 1
    return high * PIECE_STEP


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
