"""What the copy engine of a Hopper processor (TMA) can read.

A kernel that copies a tensor it cannot read fails with "misaligned address", after which the
process cannot use the GPU. So the callers of such kernels ask before.
"""

from collections.abc import Sequence

from torch import Tensor

_GLOBAL_ALIGNMENT = 16
"""Alignment, in bytes, of the address of a tensor and of its strides."""

_TILE_ALIGNMENT = 128
"""Alignment, in bytes, of a tile in shared memory. Tiles in flight lie next to each other, so
the size of a tile must be a multiple of this, too."""

_MAX_SIDE = 256
"""Maximum number of elements of a tile in one dimension."""


def can_copy(tensor: Tensor, tile: Sequence[int]) -> bool:
    """Whether tiles of this shape can be copied from a tensor to shared memory."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    tile_bytes = size
    for side in tile:
        tile_bytes *= side
    return (
        last == 1
        and tensor.data_ptr() % _GLOBAL_ALIGNMENT == 0
        and all(stride > 0 and stride * size % _GLOBAL_ALIGNMENT == 0 for stride in strides)
        and tile_bytes % _TILE_ALIGNMENT == 0
        and all(side <= _MAX_SIDE for side in tile)
    )
