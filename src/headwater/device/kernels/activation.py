"""Activations of MLPs, for use inside other kernels."""

from enum import IntEnum

import triton
import triton.language as tl


class GateActivation(IntEnum):
    """How an MLP combines its gate and up projections. Without a gate, `activate` gets the up
    projection as `gate`, and one as `up`."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with gate and up clamped; GPT-OSS."""

    SQUARED_RELU = 3


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):  # noqa: ANN201 - Triton's own types
    """Gate and up combined by `ACTIVATION`, in float32."""
    if ACTIVATION == 0:
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == 1:
        # tanh(x) is 2 sigmoid(2x) - 1, so gelu's half of (1 + tanh) is one sigmoid.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner) * up
    elif ACTIVATION == 3:
        positive = tl.maximum(gate, 0.0)
        return positive * positive * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1) * gate * tl.sigmoid(gate * alpha)
