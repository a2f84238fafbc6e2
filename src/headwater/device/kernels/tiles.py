"""The work of each program in a step with prompt chunks."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_TILE = 128
"""Queries in a tile of long chunks with small heads; `tile_queries` chooses for the others."""


def tile_queries(dtype: torch.dtype, head_dim: int, longest: int) -> int:
    """Queries in a tile, if the longest chunk has this many tokens."""
    if dtype.itemsize == 4:
        return 32
    return LARGE_TILE if head_dim <= 128 and longest > 64 else 64


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkWork:
    """The work of each program, valid for every layer of a step; lists are int32."""

    contexts: Tensor
    """Per row: tokens with KV after this step."""

    query_start: Tensor
    """Per row, and one more: the start of its tokens in the packed batch."""

    tables: Tensor
    """Slots of all rows, one after another."""

    table_start: Tensor
    tile: int
    """Queries in a tile."""

    tile_row: Tensor
    tile_start: Tensor
    """Per tile: its row, and its first token counted from the row's first."""

    longest_context: int
    use_hopper: bool = False
    """Whether there are so many tiles and keys that the Hopper kernel is worth its launch, in
    layers that it supports; it does not split tiles."""

    num_parts: int = 1
    part_keys: Tensor
    """Per tile: keys in a part, a multiple of 128; a tile has `num_parts` of them."""

    partial: Tensor
    """`[tiles, parts, tile, heads, dim]`, float32: memory for partial results, if there are
    any."""

    partial_lse: Tensor
    """`[tiles, parts, tile, heads]`, float32."""

    first_entry: int = 0
    end_entry: int = 0
    """Entries of `tables` that belong to rows with tiles, if the Hopper kernel reads 8-bit KV
    that is converted first."""

    converted: "ChunkWork | None" = None
    """The same work over converted blocks; created by the first layer."""

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """What a kernel reads to find its tile, in the order of the kernels' parameters."""
        return (
            self.contexts,
            self.query_start,
            self.tables,
            self.table_start,
            self.tile_row,
            self.tile_start,
        )
