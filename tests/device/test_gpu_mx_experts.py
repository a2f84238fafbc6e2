"""Experts in MXFP4: kernels against float64 over the dequantised weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.device.gpu import DEVICE, HALF, IS_INTERPRETED, pytestmark, require_kernels

require_kernels()

from headwater.device.gpu.packed_experts import (  # noqa: E402 - it imports Triton
    PackedWeight,
    packed_weight,
)
from headwater.device.kernels import expert_groups, mx_experts  # noqa: E402
from headwater.device.kernels.activation import GateActivation  # noqa: E402
from headwater.device.kernels.experts import ExpertWeights  # noqa: E402
from headwater.device.kernels.mx_prompts import add_prompt  # noqa: E402
from headwater.device.kernels.quantized import Code  # noqa: E402
from headwater.device.kernels.routing import (  # noqa: E402
    RouterScore,
    Routing,
    RoutingRule,
    choose_experts,
    route,
)
from tests.device.plain_unpack import use_plain_unpack  # noqa: E402

__all__ = ["pytestmark"]

EXPERTS, TOP, SIZE, INNER = 5, 2, 160, 96
"""Sizes with incomplete tiles."""

RULE = RoutingRule(top=TOP, score=RouterScore.SOFTMAX_OF_TOP)
ALPHA, LIMIT = 1.702, 7.0


@pytest.fixture(autouse=True)
def without_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no PTX."""
    if IS_INTERPRETED:
        use_plain_unpack(monkeypatch)


class Experts:
    """Random experts whose scales differ by up to 2 ** 6; memory around the weights has NaN or
    the largest scale."""

    def __init__(self) -> None:
        self.parts = [self._part(2 * INNER, SIZE), self._part(SIZE, INNER)]
        self.biases = [
            torch.randn(EXPERTS, n, device=DEVICE).to(HALF) for n in (2 * INNER, SIZE)
        ]
        up, down = self.parts
        self.weights = ExpertWeights(
            code=Code.MXFP4, gate_up=up.codes, gate_up_scales=up.scales, down=down.codes,
            down_scales=down.scales, gate_up_bias=self.biases[0], down_bias=self.biases[1],
            is_interleaved=True, activation=GateActivation.CLAMPED, alpha=ALPHA, limit=LIMIT,
        )  # fmt: skip

    @staticmethod
    def _part(lines: int, inputs: int) -> PackedWeight:
        shape = EXPERTS, lines, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(119, 126, shape, dtype=torch.uint8, device=DEVICE)
        made = packed_weight(blocks, scales)
        return PackedWeight(codes=between(made.codes), scales=between(made.scales))

    def exact(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """The sum over each row's experts, in float64."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for expert in range(EXPERTS):
            row, place = torch.where(ids == expert)
            up, down = (part.plain(expert, torch.float32).double() for part in self.parts)
            both = x.double()[row] @ up + self.biases[0][expert].double()
            gate, raised = both[:, 0::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
            inner = (raised + 1) * gate * torch.sigmoid(gate * ALPHA)
            result = inner @ down + self.biases[1][expert].double()
            out.index_add_(0, row, result * shares[row, place, None].double())
        return out


def between(values: Tensor) -> Tensor:
    """The same values, between the largest numbers and exponents."""
    around = torch.full((values.numel() + 8192,), 0xFE, dtype=torch.uint8, device=DEVICE)
    around[4096:-4096] = values.flatten()
    return around[4096:-4096].view(values.shape)


def routed(rows: int) -> Routing:
    """Expert 1 gets every row, expert 3 none."""
    logits = torch.randn(rows, EXPERTS, device=DEVICE)
    logits[:, 1], logits[:, 3] = 9.0, -9.0
    return route(logits, RULE)


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows(rows: int) -> None:
    """Results of normalised rows are added to the residual."""
    experts = Experts()
    x = torch.randn(rows, SIZE, device=DEVICE).to(HALF)
    norm = torch.rand(SIZE, device=DEVICE).to(HALF), 1e-5
    hidden = torch.randn(rows, SIZE, device=DEVICE).to(HALF)
    before = hidden.double()
    ids, shares = choose_experts(torch.randn(rows, EXPERTS, device=DEVICE), RULE)

    mx_experts.add_pairs(x, hidden, experts.weights, ids, shares, norm)

    normed = torch.rms_norm(x.double(), [SIZE], norm[0].double(), norm[1])
    assert error(hidden, before + experts.exact(normed, ids, shares)) < 1e-2


@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("rows", [7, 40, 60, 200, 450])
def test_many_rows(rows: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of every size are right, with several tiles for one expert and none for another,
    whether one program or several compute them."""
    monkeypatch.setattr(mx_experts, "row_programs", lambda *_: programs)
    experts, routing = Experts(), routed(rows)
    x = torch.randn(rows, SIZE, device=DEVICE).to(HALF)
    hidden = torch.randn(rows, SIZE, device=DEVICE).to(HALF)
    before = hidden.double()

    mx_experts.add_grouped(x, hidden, experts.weights, routing)

    assert error(hidden, before + experts.exact(x, routing.ids, routing.weights)) < 1e-2


@pytest.mark.parametrize("memory", [1, 2 * 2 * INNER * SIZE * 2, 1 << 30])
@pytest.mark.parametrize("programs", [1, 3])
def test_prompts(memory: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights dequantised for one expert at a time, for some, and for all give the same,
    whether one program or several compute the rows of an expert."""
    monkeypatch.setattr(expert_groups, "row_programs", lambda *_: programs)
    monkeypatch.setattr("headwater.device.kernels.mx_prompts._MEMORY", memory)
    experts, routing = Experts(), routed(140)
    x = torch.randn(140, SIZE, device=DEVICE).to(HALF)
    hidden = torch.randn(140, SIZE, device=DEVICE).to(HALF)
    before = hidden.double()

    add_prompt(x, hidden, experts.weights, routing)

    assert error(hidden, before + experts.exact(x, routing.ids, routing.weights)) < 1e-2


def test_rows_of_float32_are_not_rounded() -> None:
    """Models in float32 are for comparisons, so their rows are multiplied with dequantised
    weights."""
    experts, routing = Experts(), routed(3)
    weights = replace(
        experts.weights,
        gate_up_bias=experts.biases[0].float(),
        down_bias=experts.biases[1].float(),
    )
    x, hidden = torch.randn(3, SIZE, device=DEVICE), torch.randn(3, SIZE, device=DEVICE)
    before = hidden.double()

    mx_experts.add_grouped(x, hidden, weights, routing)

    assert error(hidden, before + experts.exact(x, routing.ids, routing.weights)) < 1e-5
