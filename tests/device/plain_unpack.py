"""The functions of `unpack` for MXFP4 in plain Triton, for the interpreter, which has no PTX."""

import pytest

from headwater.device.kernels import mx_experts
from tests.device.gpu import require_kernels

require_kernels()

import triton  # noqa: E402 - there is one now
import triton.language as tl  # noqa: E402


@triton.jit
def _number(bits, nibble: tl.constexpr):
    """The e2m1 number of a nibble, divided by 2 ** 14, as float32."""
    code = (bits >> (4 * nibble)) & 15
    small = ((code & 7) << 9) | ((code & 8) << 12)
    return small.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pair(w, inputs, place: tl.constexpr, nibble: tl.constexpr):
    low = _number((w >> place).to(tl.int32), nibble) * _half(inputs)
    return low + _number((w >> (place + 16)).to(tl.int32), nibble) * _half(inputs >> 16)


@triton.jit
def e2m1_products(w, a, b, c, d, e, f, g, h):
    first = _pair(w, a, 0, 0) + _pair(w, c, 0, 1) + _pair(w, e, 0, 2) + _pair(w, g, 0, 3)
    other = _pair(w, b, 32, 0) + _pair(w, d, 32, 1) + _pair(w, f, 32, 2) + _pair(w, h, 32, 3)
    return first + other


@triton.jit
def e2m1_numbers(w, scale):
    bits = w.to(tl.int32)
    kind: tl.constexpr = scale.dtype
    return (
        (_number(bits, 0) * scale.to(tl.float32)).to(kind),
        (_number(bits, 1) * scale.to(tl.float32)).to(kind),
        (_number(bits, 2) * scale.to(tl.float32)).to(kind),
        (_number(bits, 3) * scale.to(tl.float32)).to(kind),
    )


@triton.jit
def half_pair(low, high):
    bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


def use_plain_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of `mx_experts` call the functions of this module."""
    for function in (e2m1_products, e2m1_numbers, half_pair):
        monkeypatch.setattr(mx_experts, function.__name__, function)
