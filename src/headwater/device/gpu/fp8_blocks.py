"""Products of several rows with an FP8 weight whose scales belong to groups of 128 inputs:
cuBLASLt's, through torch.

Rows are quantised before, each group of 128 inputs with its own scale. The scales of the weight
have one of two forms: one for each output and group, or one for each whole block of 128 x 128. The
second has larger tiles, so it is faster if there are enough of them.
"""

from functools import lru_cache

import torch
from torch import Tensor

GROUP = 128
"""Inputs that share a scale, and outputs of a block."""

_UNIT = 4
"""The library's scales of a group begin at multiples of 16 bytes."""

_MIN_BLOCK_ROWS = 65
"""From this number of rows on, scales of whole blocks may be faster."""

_MIN_BLOCK_TILES = 96
"""Minimum number of 128 x 128 tiles of a product with scales of whole blocks: with fewer, too many
processors of an H200 have no work."""


def padded(rows: int) -> int:
    """Number of rows that the library accepts for this many rows."""
    return -(-rows // _UNIT) * _UNIT


def block_scales(scales: Tensor) -> Tensor | None:
    """`[outputs / 128, groups]`: scales of whole blocks, from those of each output and group. None
    if the outputs of a block differ, or if versions of torch disagree about the order."""
    outputs, groups = scales.shape
    if outputs % GROUP or groups % _UNIT:
        return None
    parts = scales.unflatten(0, (-1, GROUP))
    first = parts[:, :1]
    return first[:, 0].contiguous() if bool((parts == first).all()) else None


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    blocks: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`x @ weight.T` of quantised rows, `padded` of them.

    `scales` are `[groups, rows]`; `weight_scales` are `[outputs, groups]`, stored transposed;
    `blocks` is the result of `block_scales`.
    """
    of_weight = weight_scales
    if blocks is not None and prefers_blocks(len(codes), len(weight)):
        of_weight = blocks
    return torch._scaled_mm(
        codes, weight.T, scale_a=scales.T, scale_b=of_weight.T, out_dtype=dtype
    )


def prefers_blocks(rows: int, outputs: int) -> bool:
    """Whether scales of whole blocks are faster on an H200 than those of each output."""
    tiles = -(-rows // GROUP) * (outputs // GROUP)
    return rows >= _MIN_BLOCK_ROWS and tiles >= _MIN_BLOCK_TILES


@lru_cache
def offered_types(device: torch.device, outputs: int, inputs: int) -> tuple[torch.dtype, ...]:
    """Types of results for which torch has these products with weights of a shape. They depend
    on the device and on the versions of torch, CUDA and the driver, so this function tries a
    product of each type. Call it when weights are loaded."""
    if device.type != "cuda" or inputs % GROUP:
        return ()
    kinds = (torch.bfloat16, torch.float16)
    return tuple(kind for kind in kinds if _is_offered(device, outputs, inputs, kind))


def _is_offered(device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    groups = inputs // GROUP
    weight = torch.zeros((outputs, inputs), dtype=torch.float8_e4m3fn, device=device)
    forms = [torch.ones((groups, outputs), device=device).T]
    blocks = block_scales(forms[0])
    forms += [] if blocks is None else [blocks]
    try:
        for rows in (_UNIT, 4 * GROUP):
            codes = torch.zeros((rows, inputs), dtype=torch.float8_e4m3fn, device=device)
            scales = torch.ones((groups, rows), device=device).T
            for form in forms:
                torch._scaled_mm(
                    codes, weight.T, scale_a=scales, scale_b=form.T, out_dtype=dtype
                )
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):
        return False
    return True
