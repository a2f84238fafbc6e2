"""Shares a step's attention out among programs: pieces of contexts, and tiles of chunks.

Arithmetic over whole arrays, on the host; the lists go to the device with the step's inputs.
"""

from typing import NamedTuple

import numpy as np

from headwater.device.gpu.staging import IntArray
from headwater.device.kernels.decode import PIECE_STEP
from headwater.device.kv import Ints

_SPARE = 64
"""Entries beyond one a row. Rows are cut so that they do not need more."""


class Pieces(NamedTuple):
    """What `DecodeWork` says, still on the host."""

    piece: int
    work_row: IntArray
    work_start: IntArray
    row_work: IntArray


def num_entries(num_rows: int) -> int:
    """Entries of a list for so many rows; a captured graph has exactly as many programs."""
    return num_rows + _SPARE


def cut(contexts: Ints, num_rows: int) -> Pieces:
    """Cut contexts into pieces of one size, as small as the list for `num_rows` has room for."""
    room = num_entries(num_rows)
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


def tiles(counts: Ints, first_row: int, tile: int) -> tuple[IntArray, IntArray]:
    """Row and first query of each tile of rows with so many queries, from `first_row` on."""
    each = -(-counts // tile)
    ends = np.cumsum(each)
    rows = np.repeat(np.arange(len(counts)), each)
    starts = (np.arange(len(rows)) - (ends - each)[rows]) * tile
    return (rows + first_row).astype(np.int32), starts.astype(np.int32)
