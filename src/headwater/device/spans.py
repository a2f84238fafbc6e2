"""The number of visible tokens in each buffer, in the forms that computations need."""

import torch
from torch import Tensor


class SpanLengths:
    """How many tokens each buffer of a step has. All buffers have the same `width`."""

    def __init__(self, lengths: Tensor, *, width: int, kv_heads: int) -> None:
        self.lengths = lengths
        self.width = width
        self.kv_heads = kv_heads
        self._mask: Tensor | None = None
        self._made = False

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """The mask that is added to scores, `[buffers * kv_heads, 1, width]`; None if no key is
        hidden."""
        if not self._made:
            self._made = True
            keys = torch.arange(self.width, device=self.lengths.device)
            hidden = keys >= self.lengths[:, None]
            if bool(hidden.any()):
                mask = torch.zeros(hidden.shape, dtype=dtype, device=self.lengths.device)
                mask.masked_fill_(hidden, float("-inf"))
                self._mask = mask.repeat_interleave(self.kv_heads, dim=0)[:, None]
        return self._mask
