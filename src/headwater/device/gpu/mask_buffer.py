"""The masks of a step's rows on the device. They are sent on a stream of their own.

The host has the masks while the device computes the forward pass, so they are sent beside it. A
kernel sends them: a copy engine may be busy with blocks.

    compute   forward k │ sample k │ forward k+1 │ sample k+1
    masks               ↑ send k   └→ send k+1 ──↑

Two waits keep each step's masks apart: sampling waits until the masks are sent, and masks are
not sent before the previous sampling has read its own.
"""

import numpy as np
import torch

from headwater.device.gpu.staging import Staging
from headwater.device.kernels.ints import copy_ints
from headwater.device.kv import Ints
from headwater.engine.masks import StepMasks

_STAGED_ROWS = 16
"""Rows for which pinned memory is allocated at start; it grows if needed."""

_FIRST = -1
"""The priority of the stream. It is high, because the forward pass keeps all multiprocessors
busy."""


class MaskBuffer:
    """Masks of at most `max_rows` rows, in the order in which a step has them. Used by one
    thread."""

    def __init__(
        self, max_rows: int, vocab: int, device: torch.device, *, num_buffers: int
    ) -> None:
        """`num_buffers` is the number of steps with separate pinned memory: one more than may
        be in flight."""
        self._device = device
        shape = (max_rows, -(-vocab // 32))
        self.words = torch.zeros(shape, dtype=torch.int32, device=device)
        """`[rows, words]`: one bit per token, lowest bit first. The address is fixed."""
        self._staging = Staging(_STAGED_ROWS * shape[1], num_buffers=num_buffers)
        self._stream = torch.cuda.Stream(device, priority=_FIRST)
        self._sent, self._read = torch.cuda.Event(), torch.cuda.Event()
        self.mark_read()  # the zeros are not written after the first masks

    def send(self, masks: StepMasks | None, num_rows: int) -> Ints:
        """Send the masks of a step, and make the current stream wait for them. Returns the row
        of `words` for each of `num_rows` sampled rows, or -1 without a mask.

        Call `mark_read` when everything that reads `words` in this step is queued.
        """
        rows = np.full(num_rows, -1, dtype=np.int64)
        if masks is None or not masks.rows:
            return rows
        rows[masks.rows] = np.arange(len(masks.rows))
        width = self.words.shape[1]
        count = len(masks.rows) * width
        pinned, view = self._staging.take(count)
        words = view[:count].reshape(-1, width)
        # The vocabulary of the tokenizer may be smaller or larger than the model's logits.
        known = min(width, masks.words.shape[1])
        words[:, :known] = masks.words[:, :known]
        words[:, known:] = 0
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            copy_ints(pinned[:count], self.words.view(-1))
        self._sent.record(self._stream)
        # The pinned memory is free again when the step has ended, because the step waits.
        torch.cuda.current_stream(self._device).wait_event(self._sent)
        return rows

    def mark_read(self) -> None:
        """The masks of the next step may be sent after what is queued on the current stream."""
        self._read.record(torch.cuda.current_stream(self._device))
