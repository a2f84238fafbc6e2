"""The small operations of a step on a CPU, in torch; `native` has them in fewer calls."""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from headwater.device import native
from headwater.device.spans import SpanLengths


class HostOps(Protocol):
    """The operations between the matrix products of a decoder layer."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm over the last dimension."""

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of each head, `[tokens, heads, head_dim]`; `heads` may change.

        `cos` and `sin` are `[tokens, head_dim]`.
        """

    def scatter(self, source: Tensor, tokens: Tensor, rows: Tensor, target: Tensor) -> None:
        """Copy tokens of `source`, `[…, pieces, width]`, to `rows` of `target`, `[…, width]`,
        a row for each piece."""

    def own_scores(
        self, query: Tensor, keys: Tensor, spans: SpanLengths, scores: Tensor
    ) -> None:
        """Write to `scores` the products of queries with the keys of their buffer, and
        -infinity for hidden keys.

        `query` is `[heads, queries, head_dim]` with a head for each buffer and KV head, `keys`
        `[heads, span, head_dim]`, `scores` `[heads, queries, span]`.
        """

    def join_softmax(self, shared: Tensor, own: Tensor, spans: SpanLengths) -> None:
        """Softmax in place over the scores of a query on shared tokens and on its own buffer.

        `shared` is `[kv_heads, buffers * queries, tokens]`; `own` comes from `own_scores`.
        """

    def own_values(self, weights: Tensor, values: Tensor, spans: SpanLengths) -> Tensor:
        """`[heads, queries, head_dim]`: weighted values; weights of hidden keys are zero."""

    def causal_softmax(self, scores: Tensor, seen: int) -> None:
        """Softmax in place, `[…, queries, keys]`: the first query sees `seen` keys, and each
        further query one key more."""


class TorchOps:
    """`HostOps` in torch, for any dtype and device."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return torch.rms_norm(x, list(weight.shape), weight, epsilon)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        crossed = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * cos[:, None], crossed, sin[:, None])

    def scatter(self, source: Tensor, tokens: Tensor, rows: Tensor, target: Tensor) -> None:
        pieces = source.index_select(0, tokens).reshape(-1, target.shape[-1])
        target.index_copy_(0, rows, pieces)

    def own_scores(
        self, query: Tensor, keys: Tensor, spans: SpanLengths, scores: Tensor
    ) -> None:
        products = torch.bmm(query, keys.transpose(1, 2))
        mask = spans.mask(query.dtype)
        scores.copy_(products if mask is None else products.add_(mask))

    def join_softmax(self, shared: Tensor, own: Tensor, spans: SpanLengths) -> None:
        kv_heads, _, tokens = shared.shape
        buffers = len(spans.lengths)
        by_head = shared.view(kv_heads, buffers, -1, tokens)
        by_buffer = own.view(buffers, kv_heads, -1, own.shape[2])
        weights = torch.cat((by_head.transpose(0, 1), by_buffer), dim=-1).softmax(-1)
        by_head.copy_(weights[..., :tokens].transpose(0, 1))
        by_buffer.copy_(weights[..., tokens:])

    def own_values(self, weights: Tensor, values: Tensor, spans: SpanLengths) -> Tensor:
        return torch.bmm(weights, values)

    def causal_softmax(self, scores: Tensor, seen: int) -> None:
        later = torch.full(scores.shape[-2:], float("-inf"), dtype=scores.dtype)
        scores.copy_((scores + later.triu_(seen)).softmax(-1))


@cache
def host_ops(device: torch.device, dtype: torch.dtype) -> HostOps:
    """The fastest implementation for tensors of this kind."""
    if device.type == "cpu" and dtype == torch.float32:
        return native.load() or TorchOps()
    return TorchOps()
