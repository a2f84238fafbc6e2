"""Attention of a whole prompt over expanded latents (MLA).

Absorbed attention computes 3.4 times the products, which makes a long prompt slower. Nothing of
a whole prompt is cached, so its keys and values can be expanded from the latents that the step
computes. They are used once and never stored. Some heads are expanded at a time, which bounds
the memory.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from headwater.device.fp8_kv import dequantize, quantize
from headwater.device.gpu.latent import LatentWeights, RotaryTable
from headwater.device.kernels.latent_store import rotate_queries

MIN_EXPANDED_TOKENS = 2048
"""Shorter prompts are attended over latents: launching the kernels that expand them takes the host
longer than they save."""

_HEADS = 16
"""Heads that are expanded at a time."""

_MAX_KEY_SIZE = 256
_BLOCK = 64


def can_expand(weights: LatentWeights | None, pool: Tensor) -> bool:
    """Whether torch's kernel supports the heads of a layer."""
    if weights is None or weights.keys.element_size() != 2:
        return False
    _, key_dim, rank = weights.keys.shape
    key_size = key_dim + pool.shape[-1] - rank
    return weights.values.shape[2] <= key_size <= _MAX_KEY_SIZE


def attend_prompt(
    weights: LatentWeights,
    packed: Tensor,
    table: RotaryTable,
    scaling: float,
    *,
    is_fp8: bool = False,
) -> Tensor:
    """Causal attention of a prompt without cached tokens, `[tokens, heads * value_dim]`. `packed`
    are the outputs of the layer's first projection. `is_fp8` rounds latents as they are stored
    in a pool of 8-bit KV."""
    # Not a slice of the step's positions: after other rows the slice could begin at any
    # address, and Triton would compile the kernels again for an address that is no multiple of
    # 16 bytes.
    positions = torch.arange(len(packed), dtype=torch.int32, device=packed.device)
    heads, key_dim, rank = weights.keys.shape
    value_dim = weights.values.shape[2]
    tokens, rotated = len(packed), 2 * table[0].shape[1]
    blocks = -(-tokens // _BLOCK)
    pool = packed.new_empty((blocks, 1, 1, _BLOCK, 1, rank + rotated))
    weights.store(packed, positions, positions // _BLOCK, table, pool, 0)
    latents = pool.view(-1, rank + rotated)[:tokens]
    if is_fp8:
        latents = dequantize(*quantize(latents), latents.dtype)
    plain = weights.plain_queries(packed[:, : weights.query_size])
    query = packed.new_empty((tokens, heads, key_dim + rotated))
    query[..., :key_dim] = plain.view(tokens, heads, -1)[..., :key_dim]
    rotate_queries(plain, positions, table, query, weights.pairs)
    out = packed.new_empty((tokens, heads, value_dim))
    for first in range(0, heads, _HEADS):
        some = slice(first, first + _HEADS)
        own = latents[:, :rank]
        key = packed.new_empty((len(weights.keys[some]), tokens, key_dim + rotated))
        key[..., :key_dim] = torch.matmul(own, weights.keys[some].transpose(1, 2))
        key[..., key_dim:] = latents[:, rank:]
        # The kernel needs values of the size of keys.
        value = pad(torch.matmul(own, weights.values[some]), (0, key.shape[2] - value_dim))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = scaled_dot_product_attention(
                query[:, some].transpose(0, 1)[None], key[None], value[None],
                is_causal=True, scale=scaling,
            )  # fmt: skip
        out[:, some] = attended[0, ..., :value_dim].transpose(0, 1)
    return out.view(tokens, -1)
