"""Large memory that is allocated when it is first written, in huge pages if the system provides
them.

Linux treats such memory as shared memory and uses huge pages for it only if `shmem_enabled`
allows it. The weights, which every step reads completely, are in memory of torch.
"""

import math
import mmap

import torch
from torch import Tensor

from headwater.transfer.shared import SharedPages


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU its memory is allocated page by page when it is written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def shared_zeros(shape: tuple[int, ...], *, dtype: torch.dtype) -> tuple[Tensor, SharedPages]:
    """A tensor of zeros in main memory that other processes may read. It has huge pages only if
    the system allows them for shared memory; most systems do not."""
    pages = SharedPages(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages.memory, dtype=dtype).view(shape), pages
