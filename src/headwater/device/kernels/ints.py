"""Copies small arrays of integers between pinned memory and the device, with a kernel.

A copy engine is not used, because a few kilobytes would wait behind the blocks that are being
loaded or offloaded, and a step would wait for a copy.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


# Otherwise a step with a new count could wait for the compiler.
@triton.jit(do_not_specialize=["count"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < count)
    tl.store(target + at, values, mask=at < count)


def copy_ints(source: Tensor, target: Tensor) -> None:
    """Copy `source` to the beginning of `target`; either may be pinned host memory."""
    count = source.numel()
    _copy[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK)
