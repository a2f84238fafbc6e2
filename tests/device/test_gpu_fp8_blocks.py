"""Products of quantised rows with FP8 weights that have scales of blocks, against float64 over the
stored values."""

import pytest
import torch
from torch import Tensor

from tests.device.gpu import DEVICE, HALF, IS_INTERPRETED, pytestmark, require_kernels

require_kernels()

from headwater.device.kernels import fp8_block_gemm as blocks  # noqa: E402 - Triton below
from headwater.device.kernels.quantized import quantize_groups, small_gemm  # noqa: E402
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


def represented(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.double() * scales[:, : len(codes)].T.double().repeat_interleave(128, 1)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("count", [3, 150])
def test_each_group_of_a_row_has_a_scale(count: int, is_normed: bool) -> None:
    """The largest number of each group becomes 448, so no group loses more than another."""
    x = rows_of(count)
    norm = (torch.rand(SIZE, device=DEVICE).to(HALF), 1e-5) if is_normed else None
    exact = x.double()
    if norm is not None:
        exact = torch.rms_norm(exact, [SIZE], norm[0].double(), norm[1])

    codes, scales = quantize_groups(x, norm, blocks.scale_stride(count))

    groups = exact.view(count, -1, 128)
    assert error(448 * scales[:, :count].T, groups.abs().amax(-1)) < 1e-3
    wrong = (represented(codes, scales) - exact).view(count, -1, 128).abs().amax(-1)
    allowed = 0.15 if IS_INTERPRETED else 0.04  # the interpreter rounds towards zero
    assert bool((wrong <= allowed * groups.abs().amax(-1) + 1e-9).all())


@pytest.mark.parametrize("count", [2, 20, 128])
def test_products_of_few_rows(weight: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    """Plain, gated and added products, whose inputs are split among programs."""
    codes, scales, plain = weight
    arrived = torch.zeros(LINES // 64, dtype=torch.int32, device=DEVICE)
    x = quantize_groups(rows_of(count), None, blocks.scale_stride(count))
    exact = represented(*x) @ plain.T
    hidden = torch.randn(count, LINES, device=DEVICE)
    before = hidden.double()

    def product(is_gated: bool = False) -> Tensor:
        return blocks.fp8_block_gemm(
            *x, codes, scales, arrived, dtype=torch.float32, is_gated=is_gated
        )

    assert error(product(), exact) < 2e-3
    assert error(product(is_gated=True), gated(exact)) < 4e-3
    blocks.fp8_block_gemm(
        *x, codes, scales, arrived, dtype=torch.float32, residual=hidden, factor=0.5
    )
    assert error(hidden, before + 0.5 * exact) < 2e-3
    assert not arrived.any(), "counters are zero again"


@pytest.mark.parametrize("count", [129, 300])
def test_products_of_many_rows(weight: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    """More rows than one tile has, and not a multiple of it."""
    codes, scales, plain = weight
    x = quantize_groups(rows_of(count), None, blocks.scale_stride(count))

    ours = blocks.fp8_block_tiled(*x, codes, scales, torch.float32)

    assert error(ours, represented(*x) @ plain.T) < 2e-3


def test_products_without_the_fp8_tensor_cores(
    weight: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Weights are converted, rows are not quantised, and scales may be stored in any order."""
    codes, scales, plain = weight
    x = rows_of(20)
    exact = x.double() @ plain.T

    for stored in (scales, scales.contiguous()):
        assert error(small_gemm(x, codes, stored, group=128), exact) < 5e-3
