"""Programmatic dependent launch: a kernel starts while the kernel before it ends.

With few rows, a kernel takes a few microseconds, and starting and draining it takes a good part
of that. A kernel that starts early waits in `start_early` until the kernel before it is complete and
its results are visible. Before that it may only read what no kernel of the step writes: weights, and
the lists that divide attention. Every program of such a kernel must call `start_early` before it
reads anything else, writes or returns; then a kernel is complete only after all kernels before it,
and memory can be reused as usual. The first kernel of a step is launched as usual, so that
everything sent for the step is visible to all of its kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_EARLY_ROWS = 64
"""Kernels over at most this many rows start early."""

_MAX_ROW_SIZE = 4095
"""A kernel over a single row starts early if the row has at most this many elements. The
product of a larger row takes so long that an early start gains little, and it is slower if the
next kernel already occupies a part of the processors."""


def starts_early(rows: Tensor, size: int | None = None) -> bool:
    """Whether a kernel over `rows` starts early: the value of `EARLY` and `launch_pdl` in its
    launch. `size` is the number of elements of a row; the default is the last dimension of
    `rows`."""
    row_size = rows.shape[-1] if size is None else size
    return (
        rows.is_cuda
        and len(rows) <= MAX_EARLY_ROWS
        and (len(rows) > 1 or row_size <= _MAX_ROW_SIZE)
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


@triton.jit
def start_early(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait until the kernel before is complete."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
