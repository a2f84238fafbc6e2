"""The small operations of a step on a CPU, in torch; `native` has them in fewer calls."""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from headwater.device import native


class HostOps(Protocol):
    """What stands between the matrix products of a decoder layer."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm over the last dimension."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the halves of each head, `[tokens, heads, head_dim]`; `heads` may change.

        `cos` and `sin` are `[tokens, head_dim]`.
        """

    def scatter(self, source: Tensor, tokens: Tensor, rows: Tensor, target: Tensor) -> None:
        """Copy tokens of `source`, `[…, pieces, width]`, to `rows` of `target`, `[…, width]`,
        a row for each piece."""


class TorchOps:
    """For any dtype and device."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return torch.rms_norm(x, list(weight.shape), weight, epsilon)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        crossed = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * cos[:, None], crossed, sin[:, None])

    def scatter(self, source: Tensor, tokens: Tensor, rows: Tensor, target: Tensor) -> None:
        pieces = source.index_select(0, tokens).reshape(-1, target.shape[-1])
        target.index_copy_(0, rows, pieces)


@cache
def host_ops(device: torch.device, dtype: torch.dtype) -> HostOps:
    """The fastest there are for tensors of this kind."""
    if device.type == "cpu" and dtype == torch.float32:
        return native.load() or TorchOps()
    return TorchOps()
