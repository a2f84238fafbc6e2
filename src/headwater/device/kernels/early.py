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
"""Largest size of a single row for which they do. Products of one larger row take so long that their
starts weigh little, and they are slower if the next ones already hold a part of the processors."""


def starts_early(rows: Tensor, size: int | None = None) -> bool:
    """Whether a kernel over `rows` starts early; for `EARLY` and `launch_pdl` of its launch.
    `size` is that of a row, by default the last of `rows`."""
    row_size = rows.shape[-1] if size is None else size
    return (
        rows.is_cuda
        and len(rows) <= MAX_EARLY_ROWS
        and (len(rows) > 1 or row_size <= _MAX_ROW_SIZE)
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


@triton.jit
def start_early(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
