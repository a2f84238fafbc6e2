"""Products of each head with its own weight, against float64."""

import pytest
import torch

from tests.device.gpu import DEVICE, pytestmark, require_gpu

require_gpu()

from headwater.device.kernels.heads import by_head  # noqa: E402 - it imports Triton

__all__ = ["pytestmark"]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products_of_heads(num_rows: int) -> None:
    """Each head has its own weight, whichever of its sides is contiguous."""
    for inputs, outputs in ((128, 512), (512, 128), (48, 24)):
        x = torch.randn(num_rows, 6, inputs + 64, device=DEVICE).bfloat16()[..., :inputs]
        weight = torch.randn(6, inputs, outputs, device=DEVICE).bfloat16()
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        exact = torch.einsum("thi,hio->tho", x.double(), weight.double())
        for one in (weight, turned):
            out = torch.full((num_rows, 6, outputs + 8), float("nan"), device=DEVICE).bfloat16()
            by_head(x, one, out[..., :outputs])
            assert error(out[..., :outputs], exact) < 1e-2
            assert out[..., outputs:].isnan().all()
