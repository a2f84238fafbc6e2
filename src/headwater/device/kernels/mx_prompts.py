"""Products of prompts with experts in MXFP4.

With many rows for each expert, converting a weight again for each tile of rows takes longer than
its products. So the weights of some experts at a time are dequantised into memory, and multiplied
like any others. Numbers in MXFP4 are exact in the 16-bit types.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.expert_groups import combine_pairs, multiply_grouped
from headwater.device.kernels.experts import ExpertWeights
from headwater.device.kernels.quantized import e2m1_values
from headwater.device.kernels.routing import Routing

MIN_ROWS = 192
"""Smallest average number of rows of an expert for which dequantising is faster."""

_MEMORY = 128 << 20
"""Bytes of dequantised weights at a time. A part of them is still in the cache when it is
multiplied."""

_GROUPS = 256
"""Groups of 32 inputs that a program dequantises."""


@triton.jit
def _unpack(weight, scales, out, first, last, GROUPS: tl.constexpr):
    """Dequantise groups `first` to `last` of a weight whose groups are contiguous. A group may be
    in any line of the weight."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    known = group < last - first
    source = first + group.to(tl.int64)
    exponent = tl.load(scales + source, mask=known, other=0).to(tl.int32)
    # An exponent of 0 stands for 2 ** -127, which is half of the number with these bits.
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    number = tl.arange(0, 8)[None, :]
    w = tl.load(weight + source[:, None] * 8 + number, mask=known[:, None], other=0)
    w = w.to(tl.int32)
    kind: tl.constexpr = out.dtype.element_ty
    evens = tl.join(_part(w, scale, 0, kind), _part(w, scale, 2, kind))
    odds = tl.join(_part(w, scale, 1, kind), _part(w, scale, 3, kind))
    # In the order of inputs, so that programs write whole lines of memory. Writing a quarter of
    # each 64 bytes at a time takes twice as long.
    values = tl.permute(tl.join(evens, odds), (0, 2, 3, 1))
    place = out + group.to(tl.int64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(place, tl.reshape(values, (GROUPS, 32)), mask=known[:, None])


@triton.jit
def _part(w, scale, number: tl.constexpr, kind: tl.constexpr):
    """Numbers of nibble `number` of each element."""
    return (e2m1_values((w >> (4 * number)) & 15) * scale[:, None]).to(kind)


def add_prompt(
    normed: Tensor, hidden: Tensor, weights: ExpertWeights, routing: Routing
) -> None:
    """See `expert_groups.add_grouped`."""
    rows, size = normed.shape
    top = routing.ids.shape[1]
    narrow = normed.new_empty((rows * top, weights.inner))
    wide = normed.new_empty((rows * top, size))
    _multiply(normed, weights, routing, narrow, is_gated=True)
    _multiply(narrow, weights, routing, wide, is_gated=False)
    combine_pairs(wide, hidden, top)


def _multiply(
    x: Tensor, weights: ExpertWeights, routing: Routing, out: Tensor, *, is_gated: bool
) -> None:
    """`multiply_grouped` with dequantised weights, of a few experts at a time."""
    packed, scales, bias = weights.part(is_gated=is_gated)
    assert scales is not None, "weights in MXFP4 have scales"
    count, lines, _ = packed.shape
    each = max(1, min(count, _MEMORY // (lines * x.shape[1] * x.element_size())))
    plain = torch.empty((each, lines, x.shape[1]), dtype=x.dtype, device=x.device)
    for begin in range(0, count, each):
        end = min(begin + each, count)
        mine = plain[: end - begin]
        _dequantize_experts(packed, scales, mine, begin, end)
        own_bias = None if bias is None else bias[begin:end]
        some = replace(
            weights, code=None, gate_up=mine, down=mine, gate_up_scales=None, down_scales=None,
            gate_up_bias=own_bias, down_bias=own_bias,
        )  # fmt: skip
        part = routing._replace(
            lists=routing.lists[begin:end], counts=routing.counts[begin:end]
        )
        multiply_grouped(x, some, part, out, is_gated=is_gated, experts=count)


def _dequantize_experts(
    packed: Tensor, scales: Tensor, out: Tensor, begin: int, end: int
) -> None:
    """The weights of experts `begin` to `end` in `out`."""
    each = scales[0].numel()
    _unpack[(triton.cdiv((end - begin) * each, _GROUPS),)](
        packed.view(torch.int16), scales, out, begin * each, end * each, GROUPS=_GROUPS,
        num_warps=4,
    )  # fmt: skip
