"""Programmatic dependent launch: a kernel starts while the kernel before it ends.

With few rows, a kernel takes a few microseconds, and starting and draining it takes a good part
of that. A kernel that starts early waits in `start_early` until the kernel before it is complete and
its results are visible. Before that it may only read what no kernel of the step writes: weights, and
the lists that divide attention. Every program of such a kernel must call `start_early` before it
reads anything else, writes or returns; then a kernel is complete only after all kernels before it,
and memory can be reused as usual. A kernel that starts as usual may let the next one start early: the
product of a single large row starts as usual, and the kernel after it starts early. The first kernel
of a step is launched as usual, so that everything sent for the step is visible to all of its kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_EARLY_ROWS = 64
"""Kernels over at most this many rows start early."""

MAX_EARLY_EXPERT_ROWS = 256
"""The same for kernels between the router and the sum of experts' results, of which there are
several for few rows of each expert."""

_MAX_ROW_SIZE = 4095
"""A product of a single row starts early if the row has at most this many elements. The product of
a larger row takes so long that an early start gains little, and its programs are spread unevenly if
the kernel before still occupies a part of the processors."""


def starts_early(
    rows: Tensor,
    size: int | None = None,
    *,
    most: int | None = None,
    is_short: bool = False,
) -> bool:
    """Whether a kernel over `rows` starts early: the value of `EARLY` and `launch_pdl` in its
    launch. `size` is the number of elements of a row; the default is the last dimension of
    `rows`. `most` is the maximum number of rows; the default is `MAX_EARLY_ROWS`. `is_short` means
    that a single row takes little time, however large it is."""
    row_size = rows.shape[-1] if size is None else size
    is_wide = len(rows) == 1 and row_size > _MAX_ROW_SIZE
    return lets_next_start(rows, most=most) and (is_short or not is_wide)


def lets_next_start(rows: Tensor, *, most: int | None = None) -> bool:
    """Whether the kernel after one over `rows` may start early: the value of `NEXT` in its
    launch. `most` is the maximum number of rows; the default is `MAX_EARLY_ROWS`."""
    return (
        rows.is_cuda
        and len(rows) <= (MAX_EARLY_ROWS if most is None else most)
        and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    )


@triton.jit
def start_early(EARLY: tl.constexpr, NEXT: tl.constexpr = False) -> None:
    """Let the next kernel start, and wait until the kernel before is complete. With `NEXT` alone,
    this kernel started as usual, so there is nothing to wait for."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    elif NEXT:
        gdc_launch_dependents()
