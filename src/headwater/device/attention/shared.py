"""Attention of decode rows that begin with the same blocks.

The shared prefix is read once for all rows, in one product with many queries, instead of once
per row. Rows share it if their block tables begin with the same slots, so the KV is the same.

    scores of a row   |   shared: one product per head |  own: one product per row |
                      0                              shared                     span
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.device.host_ops import HostOps
from headwater.device.kv import Ints
from headwater.device.spans import SpanLengths

_MIN_ROWS = 8
_MIN_TOKENS = 128
_MIN_SHARE = 0.4
"""Measured on one core: below any of these values, the copies cost more than the saved
reads."""


def shared_tokens(tables: NDArray[np.int64], contexts: Ints, block_tokens: int) -> int:
    """Leading tokens that are in the same slots in all rows, or 0 if sharing is not worth it. A
    row's own token of this step is never included."""
    if len(tables) < _MIN_ROWS:
        return 0
    differs = (tables != tables[0]).any(axis=0)
    same = int(differs.argmax()) if differs.any() else tables.shape[1]
    shared = min(same, (int(contexts.min()) - 1) // block_tokens) * block_tokens
    enough = shared >= _MIN_TOKENS and shared >= _MIN_SHARE * int(contexts.max())
    return shared if enough else 0


def attend_shared(
    ops: HostOps,
    grouped: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    spans: SpanLengths,
) -> Tensor:
    """`[buffers * kv_heads, queries, head_dim]`, from scaled queries of that shape.

    `prefix` is K and V of the shared tokens, `[kv_heads, shared, head_dim]`, possibly empty.
    `own` is K and V of the other tokens, `[buffers * kv_heads, others, head_dim]`; `spans`
    tells how many of them each buffer has.
    """
    kv_heads, shared, head_dim = prefix[0].shape
    queries = grouped.shape[1]
    scores = grouped.new_empty(len(grouped), queries, own[0].shape[1])
    ops.own_scores(grouped, own[0], spans, scores)
    if not shared:
        return ops.own_values(scores.softmax(-1), own[1], spans)
    by_head = grouped.view(-1, kv_heads, queries, head_dim).transpose(0, 1)
    together = torch.bmm(by_head.reshape(kv_heads, -1, head_dim), prefix[0].transpose(1, 2))
    ops.join_softmax(together, scores, spans)
    out = ops.own_values(scores, own[1], spans)
    summed = torch.bmm(together, prefix[1])
    turned = summed.view(kv_heads, -1, queries, head_dim).transpose(0, 1)
    out.view(-1, kv_heads, queries, head_dim).add_(turned)
    return out
