"""Products of each head with its own weight, against float64."""

import pytest
import torch

from tests.device.gpu import DEVICE, HALF, pytestmark, require_kernels

require_kernels()

from headwater.device.kernels.heads import absorb, by_head  # noqa: E402 - it imports Triton
from headwater.device.kernels.latent_store import rotate_queries  # noqa: E402
from headwater.device.kernels.rotary import RotaryPairs  # noqa: E402

__all__ = ["pytestmark"]


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products_of_heads(num_rows: int) -> None:
    """Each head has its own weight, whichever of its sides is contiguous."""
    for inputs, outputs in ((128, 512), (512, 128), (48, 24)):
        x = torch.randn(num_rows, 6, inputs + 64, device=DEVICE).to(HALF)[..., :inputs]
        weight = torch.randn(6, inputs, outputs, device=DEVICE).to(HALF)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        exact = torch.einsum("thi,hio->tho", x.double(), weight.double())
        for one in (weight, turned):
            out = torch.full((num_rows, 6, outputs + 8), float("nan"), device=DEVICE).to(HALF)
            by_head(x, one, out[..., :outputs])
            assert error(out[..., :outputs], exact) < 1e-2
            assert out[..., outputs:].isnan().all()


@pytest.mark.parametrize("pairs", list(RotaryPairs))
@pytest.mark.parametrize("num_rows", [1, 4, 20])
def test_absorbed_queries(num_rows: int, pairs: RotaryPairs) -> None:
    """Few rows are computed in one kernel and many rows in two. The result has the products of
    each head and its rotated elements."""
    heads, plain, latent, rotated = 6, 48, 80, 16
    packed = torch.randn(num_rows, heads * (plain + rotated) + 32, device=DEVICE).to(HALF)
    packed = packed[:, :-32]
    weight = torch.randn(heads, plain, latent, device=DEVICE).to(HALF)
    angles = torch.randn(9, rotated // 2, device=DEVICE)
    table = angles.cos(), angles.sin()
    positions = torch.randint(0, 9, (num_rows,), device=DEVICE).int()
    query = torch.full((num_rows, heads, latent + rotated), float("nan"), device=DEVICE).to(
        HALF
    )

    absorb(packed, weight, positions, table, query, pairs)

    own = packed.double().view(num_rows, heads, -1)
    exact = torch.einsum("thi,hio->tho", own[..., :plain], weight.double())
    assert error(query[..., :latent], exact) < 1e-2
    expected = torch.empty_like(query)
    rotate_queries(packed, positions, table, expected, pairs)
    assert torch.equal(query[..., latent:], expected[..., latent:])
