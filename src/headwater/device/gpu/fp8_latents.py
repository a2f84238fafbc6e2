"""Checks at start whether kernels over 8-bit latents compute what they compute over the same numbers
in the model's dtype."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.fp8_kv import Fp8KVPool
from headwater.device.gpu.inputs import decode_work
from headwater.device.gpu.warm import chunk_work
from headwater.device.gpu.work import split_contexts
from headwater.device.kernels.decode import attend_decodes
from headwater.device.kernels.latent_store import store_latents
from headwater.device.kernels.prefill import attend_chunks
from headwater.device.kernels.rotary import RotaryPairs
from headwater.device.kernels.tiles import tile_queries
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.device.parallel.sharding import own_heads

_CONTEXT = 200
_VARIANT = Variant(0.05)
_MOST_APART = 0.02


def latent_fault(model: LoadedModel, block_tokens: int) -> str | None:
    """Why KV of this model cannot be stored in 8 bits; None if it can."""
    layer = replace(model, num_layers=1, has_fp8_kv=False)
    sizes: dict[str, Any] = {
        "num_blocks": -(-_CONTEXT // block_tokens),
        "block_tokens": block_tokens,
    }
    try:
        stored = Fp8KVPool(replace(layer, has_fp8_kv=True), **sizes)
        errors = differences(stored, KVPool(layer, **sizes), own_heads(model.module))
    except Exception as exc:  # noqa: BLE001 - the compiler and the driver raise many kinds
        return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    wrong = [error for error in errors if not error <= _MOST_APART]  # NaN is wrong, too
    return f"results differ by {wrong[0]:.3g}" if wrong else None


def differences(stored: KVPool, plain: KVPool, heads: int) -> list[float]:
    """Relative errors of storing in `stored`, and of attending to it, compared with `plain`. Both
    pools have one layer and are overwritten."""
    device, dtype, size = plain.device, plain.dtype, plain.head_dim
    half = (size - plain.value_dim) // 2
    latents = torch.randn(_CONTEXT, size, device=device)
    latents = (latents * torch.exp(torch.randn(_CONTEXT, 1, device=device))).to(dtype)
    positions = torch.arange(_CONTEXT, dtype=torch.int32, device=device)
    norm = torch.rand(plain.value_dim, device=device).to(dtype), 1e-6
    angles = torch.randn(_CONTEXT, half, device=device)
    for pool in (stored, plain):
        store_latents(
            latents, positions, positions // pool.block_tokens, norm,
            (angles.cos(), angles.sin()), pool.data, 0, RotaryPairs.HALVES,
        )  # fmt: skip
    slots = torch.arange(plain.num_blocks, device=device)
    found = stored.read_whole(slots)
    errors = [_error(found, stored.rounded(plain.data))]
    plain.data.copy_(found)
    query = torch.randn(_CONTEXT, heads * size, device=device).to(dtype)
    for attended, expected in zip(
        _attended(stored, query, heads), _attended(plain, query, heads), strict=True
    ):
        errors.append(_error(attended, expected))
    return errors


def _attended(pool: KVPool, query: Tensor, heads: int) -> list[Tensor]:
    """Attention of the last token, and of a chunk, whole and in parts."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=pool.device)

    tile = tile_queries(pool.dtype, pool.head_dim, 64)
    results = [query.new_zeros((n, heads, pool.value_dim)) for n in (1, tile, tile)]
    pieces = split_contexts(torch.tensor([_CONTEXT]).numpy(), 1, 1)
    tables = torch.arange(pool.num_blocks, dtype=torch.int32, device=pool.device)
    lists = [ints(pieces.piece), *(ints(*each.tolist()) for each in pieces[1:])]
    decodes = decode_work(ints(_CONTEXT), tables, ints(0), lists, pool, heads)
    attend_decodes(query[-1:], pool.data, 0, decodes, _VARIANT, results[0])
    for out, num_parts in zip(results[1:], (1, 4), strict=True):
        work = chunk_work(pool, heads, tile, num_parts, count=tile, context=_CONTEXT)
        attend_chunks(query[-tile:], pool.data, 0, work, _VARIANT, out)
    return results


def _error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.float() - exact.float()).norm() / exact.float().norm())
