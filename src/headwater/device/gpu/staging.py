"""Integers on their way to the device: packed into pinned memory, sent in one piece.

A step needs a dozen small arrays. Each copy of its own would cost more than all their bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.device.kernels.ints import copy_ints
from headwater.scheduler.batch import IntArray

_ALIGN = 4
"""Arrays begin at multiples of 16 bytes: kernels are compiled for that once, and not again."""


class Staging:
    """A ring of pinned buffers. One is used again when as many steps have been collected."""

    def __init__(self, num_ints: int, *, num_buffers: int) -> None:
        self._buffers: list[Tensor] = []
        self._num_buffers = num_buffers
        self._next = 0
        self._grow(num_ints)

    def take(self, num_ints: int) -> tuple[Tensor, IntArray]:
        """A pinned buffer of at least `num_ints`, as a tensor and as an array."""
        if num_ints > self._buffers[0].numel():
            # Those in use are read by work that is queued: they may go when it is done.
            torch.cuda.synchronize()
            self._grow(num_ints + num_ints // 2)
        pinned = self._buffers[self._next % self._num_buffers]
        self._next += 1
        return pinned, pinned.numpy()

    def send(self, arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
        """All `arrays` on the device, views of one tensor; returns before they are there."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-max(len(array), 1) // _ALIGN) * _ALIGN
        pinned, view = self.take(end)
        for start, array in zip(starts, arrays, strict=True):
            view[start : start + len(array)] = array
        sent = torch.empty(end, dtype=torch.int32, device=device)
        copy_ints(pinned[:end], sent)
        return [
            sent[start : start + len(array)]
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _grow(self, num_ints: int) -> None:
        self._buffers = [
            torch.empty(num_ints, dtype=torch.int32, pin_memory=True)
            for _ in range(self._num_buffers)
        ]
