"""Large memory: free of charge until it is touched, in huge pages where the system gives them.

Such memory is shared memory to Linux, which has huge pages for it only where `shmem_enabled`
says so; those of the weights, which are read from end to end in every step, are torch's.
"""

import math
import mmap

import torch
from torch import Tensor

from headwater.transfer.shared import SharedPages


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a CPU its memory is taken page by page, as it is written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def shared_zeros(shape: tuple[int, ...], *, dtype: torch.dtype) -> tuple[Tensor, SharedPages]:
    """The same in main memory that other processes may be let read. Its pages are huge only
    where the system allows that for shared memory, which most do not."""
    pages = SharedPages(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages.memory, dtype=dtype).view(shape), pages
