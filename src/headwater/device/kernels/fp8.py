"""8-bit KV inside kernels, as `fp8_kv` defines it: scales are powers of two, stored as
exponents."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scale_exponent(top):  # noqa: ANN201 - Triton's own types
    """The exponent byte for heads whose largest element is `top`, as int32."""
    bits = top.to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.maximum((bits >> 23) - 8 + above, 1)


@triton.jit
def stored_exponent(top, KIND: tl.constexpr):  # noqa: ANN201 - Triton's own types
    """`scale_exponent` of a stored head of this type: float16 cannot represent exactly what
    smaller scales would give."""
    return tl.maximum(scale_exponent(top), 112 if tl.float16 == KIND else 1)


@triton.jit
def power_of_two(exponent):  # noqa: ANN201 - Triton's own types
    """2 ** (exponent - 127), for int32 exponents of 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_layer(pool, slots, out, block_stride, layer_at, NUMBERS: tl.constexpr,
                      DIM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < NUMBERS
    start = tl.load(slots + entry).to(tl.int64) * block_stride + layer_at
    numbers = tl.load(pool + start + at, mask=inside, other=0.0).to(tl.float32)
    exponents = pool.to(tl.pointer_type(tl.uint8)) + start + NUMBERS
    scale = power_of_two(tl.load(exponents + at // DIM, mask=inside, other=1).to(tl.int32))
    tl.store(
        out + entry * NUMBERS + at, (numbers * scale).to(out.dtype.element_ty), mask=inside
    )


def dequantize_layer(pool: Tensor, layer: int, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise one layer of these blocks; returns a pool of that layer only, `[slots, 1, 2,
    …]`, of `dtype`."""
    shape = (len(slots), 1, *pool.shape[2:])
    out = torch.empty(shape, dtype=dtype, device=pool.device)
    numbers = out[0].numel()
    block = min(4096, triton.next_power_of_2(numbers))
    _dequantize_layer[(len(slots), triton.cdiv(numbers, block))](
        pool, slots, out, pool.stride(0), layer * pool.stride(1), NUMBERS=numbers,
        DIM=pool.shape[-1], BLOCK=block,
    )  # fmt: skip
    return out
