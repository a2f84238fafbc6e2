"""Kernels around products with FP8 weights that have scales of blocks, against float64 over the
stored values."""

import pytest
import torch
from torch import Tensor

from tests.device.gpu import DEVICE, HALF, IS_INTERPRETED, pytestmark, require_kernels

require_kernels()

from headwater.device.gpu.fp8_blocks import padded  # noqa: E402 - Triton below
from headwater.device.kernels.activation import GateActivation  # noqa: E402
from headwater.device.kernels.quantized import (  # noqa: E402
    quantize_gated,
    quantize_groups,
    small_gemm,
)
from headwater.device.kernels.rows import gate  # noqa: E402
from tests.device.test_gpu_kernels import error, gated  # noqa: E402

__all__ = ["pytestmark"]

LINES, SIZE = 256, 1792


@pytest.fixture
def weight() -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales that are stored transposed, and the weight they represent."""
    torch.manual_seed(3)
    codes = (60 * torch.randn(LINES, SIZE)).to(torch.float8_e4m3fn).to(DEVICE)
    scales = (torch.rand(SIZE // 128, LINES, device=DEVICE) + 0.5).T / 100
    plain = codes.double() * scales.double().repeat_interleave(128, 1)
    return codes, scales, plain


def rows_of(count: int) -> Tensor:
    """Rows whose groups differ in size; one group is zero."""
    x = torch.randn(count, SIZE, device=DEVICE)
    x *= torch.exp(torch.randn(count, SIZE // 128, device=DEVICE)).repeat_interleave(128, 1)
    x[0, :128] = 0.0
    return x.to(HALF)


def represented(codes: Tensor, scales: Tensor, count: int) -> Tensor:
    return (codes.double() * scales.T.double().repeat_interleave(128, 1))[:count]


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("count", [3, 150])
def test_each_group_of_a_row_has_a_scale(count: int, is_normed: bool) -> None:
    """The largest number of each group becomes 448, so no group loses more than another."""
    x = rows_of(count)
    norm = (torch.rand(SIZE, device=DEVICE).to(HALF), 1e-5) if is_normed else None
    exact = x.double()
    if norm is not None:
        exact = torch.rms_norm(exact, [SIZE], norm[0].double(), norm[1])

    codes, scales = quantize_groups(x, norm, padded(count))

    groups = exact.view(count, -1, 128)
    assert error(448 * scales[:, :count].T, groups.abs().amax(-1)) < 1e-3
    wrong = (represented(codes, scales, count) - exact).view(count, -1, 128).abs().amax(-1)
    allowed = 0.15 if IS_INTERPRETED else 0.04  # the interpreter rounds towards zero
    assert bool((wrong <= allowed * groups.abs().amax(-1) + 1e-9).all())


@pytest.mark.parametrize("in_halves", [False, True])
def test_gate_and_up_are_interleaved_or_in_halves(in_halves: bool) -> None:
    """Both orders give the gated result of the same numbers."""
    x = torch.randn(5, 3000, device=DEVICE).to(HALF)
    exact = gated(x.double())
    if in_halves:
        x = torch.cat((x[:, ::2], x[:, 1::2]), dim=1)

    assert error(gate(x, in_halves=in_halves), exact) < 1e-2


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
def test_gated_rows_are_quantised_at_once(by_row: bool, in_halves: bool) -> None:
    """Elements and scales are those of the gated rows, for one scale and for many."""
    x = torch.randn(6, 2 * SIZE, device=DEVICE).to(HALF)
    exact = gated(x.double())
    if in_halves:
        x = torch.cat((x[:, ::2], x[:, 1::2]), dim=1)

    codes, scales = quantize_gated(
        x, GateActivation.SILU, 8, by_row=by_row, in_halves=in_halves
    )

    each = scales if by_row else scales.T.repeat_interleave(128, 1)
    groups = exact.view(6, 1 if by_row else -1, SIZE if by_row else 128)
    tops = groups.abs().amax(-1)
    assert error(448 * (scales if by_row else scales.T)[:6], tops) < 1e-3
    wrong = ((codes.double() * each.double())[:6] - exact).view_as(groups).abs().amax(-1)
    assert bool((wrong <= (0.15 if IS_INTERPRETED else 0.04) * tops).all())


def test_products_without_the_fp8_tensor_cores(
    weight: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Weights are converted, rows are not quantised, and scales may be stored in any order."""
    codes, scales, plain = weight
    x = rows_of(20)
    exact = x.double() @ plain.T

    for stored in (scales, scales.contiguous()):
        assert error(small_gemm(x, codes, stored, group=128), exact) < 5e-3
