"""Unpacks 4-bit codes from the 32-bit integers of weight files.

GPTQ   `[inputs / 8, outputs]`   nibble i is input 8 r + i
AWQ    `[inputs, outputs / 8]`   nibble i is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
packed `[outputs, inputs / 8]`   nibble i is input 8 c + i
"""

import torch
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def nibbles(packed: Tensor, dim: int) -> Tensor:
    """The eight codes of each integer along `dim`, lowest bits first; uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    spread = (packed.movedim(dim, -1)[..., None] >> shifts) & 15
    return spread.flatten(-2).to(torch.uint8).movedim(-1, dim)


def awq_nibbles(packed: Tensor) -> Tensor:
    """The eight codes of each integer along the last dimension, in AWQ's order; uint8."""
    spread = nibbles(packed, -1).view(*packed.shape, 8)
    place = torch.tensor([_AWQ_ORDER.index(n) for n in range(8)])
    return spread[..., place].flatten(-2)
