"""What is attended by which program, in a step with chunks of prompts."""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_TILE = 128
"""Queries in a tile, unless they are few or large."""


def tile_queries(dtype: torch.dtype, head_dim: int, longest: int) -> int:
    """Queries in a tile, where the longest chunk has so many tokens."""
    if dtype.itemsize == 4:
        return 32
    return LARGE_TILE if head_dim <= 128 and longest > 64 else 64


@dataclass(slots=True, kw_only=True, eq=False)
class ChunkWork:
    """Which program attends what, good for every layer of a step; lists are int32."""

    contexts: Tensor
    """Per row: tokens with KV once this step is done."""

    query_start: Tensor
    """Per row and one more: where its tokens are in the packed batch."""

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
    """Tiles and keys are so many that Hopper's own kernel is worth its launch, in layers that it
    can attend; it takes tiles whole."""

    num_parts: int = 1
    part_keys: Tensor
    """Per tile: keys in a part, a multiple of 64; a tile has `num_parts` of them."""

    partial: Tensor
    """`[tiles, parts, tile, heads, dim]`, float32: room for partial results, if any."""

    partial_lse: Tensor
    """`[tiles, parts, tile, heads]`, float32."""

    first_entry: int = 0
    end_entry: int = 0
    """Which entries of `tables` are of rows with tiles, where the kernel for Hopper reads 8-bit
    KV that is converted first."""

    converted: "ChunkWork | None" = None
    """The same work over converted blocks; made by the first layer."""
