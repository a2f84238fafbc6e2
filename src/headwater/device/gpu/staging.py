"""Sends integer arrays to the device in one piece, through pinned memory.

A step needs a dozen small arrays. Starting a copy for each would take longer than moving all
their bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.device.kernels.ints import copy_ints
from headwater.scheduler.batch import IntArray

_ALIGN = 4
"""Arrays begin at multiples of 16 bytes, so that kernels are compiled for this alignment
only."""


class Staging:
    """A ring of pinned buffers. A buffer is used again after `num_buffers` steps; by then, the
    step that used it has been collected."""

    def __init__(self, num_ints: int, *, num_buffers: int) -> None:
        self._buffers: list[Tensor] = []
        self._num_buffers = num_buffers
        self._next = 0
        self._grow(num_ints)

    def take(self, num_ints: int) -> tuple[Tensor, IntArray]:
        """A pinned buffer of at least `num_ints`, as a tensor and as an array."""
        if num_ints > self._buffers[0].numel():
            # Queued work may still read the buffers in use; they are freed when it has
            # finished.
            torch.cuda.synchronize()
            self._grow(num_ints + num_ints // 2)
        pinned = self._buffers[self._next % self._num_buffers]
        self._next += 1
        return pinned, pinned.numpy()

    def send(self, arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
        """All `arrays` on the device, as views of one tensor. Returns before they have
        arrived."""
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
