"""The norm, router and choice of experts in one kernel, against separate ones."""

import pytest
import torch

from tests.device.gpu import DEVICE, HALF, pytestmark, require_kernels

require_kernels()

from headwater.device.kernels import rows  # noqa: E402 - it imports Triton
from headwater.device.kernels.expert_choice import fits, normalise_and_choose  # noqa: E402
from headwater.device.kernels.routing import (  # noqa: E402
    RouterScore,
    RoutingRule,
    choose_experts,
)

__all__ = ["pytestmark"]

EPSILON = 1e-5
RULES = [
    RoutingRule(top=2, score=RouterScore.SOFTMAX_OF_TOP),
    RoutingRule(top=3, score=RouterScore.SOFTMAX, renormalise=True),
    RoutingRule(top=1, score=RouterScore.SOFTMAX, scale=2.0),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(("size", "experts"), [(32, 3), (352, 5), (2880, 32)])
def test_is_the_same_as_separate_kernels(
    size: int, experts: int, is_added: bool, rule: RoutingRule
) -> None:
    """A row is normalised after the bias is added to it, and its experts are those of its
    logits. The logits differ clearly, so that rounding does not decide."""
    hidden = (torch.randn(3, size, device=DEVICE) * 2).to(HALF)
    added = torch.randn(size, device=DEVICE).to(HALF) if is_added else None
    weight = torch.rand(size, device=DEVICE).to(HALF)
    router = torch.randn(experts, size, device=DEVICE).to(HALF)
    bias = torch.randn(experts, device=DEVICE).to(HALF)
    summed = hidden.clone() if added is None else hidden + added
    exact = torch.rms_norm(summed.float(), [size], weight.float(), EPSILON)
    logits = exact @ router.float().T + bias.float()

    normed, ids, weights = normalise_and_choose(
        hidden, (weight, EPSILON), router, bias, rule, added
    )

    assert torch.equal(hidden, summed)
    assert torch.allclose(normed.float(), exact, rtol=4e-3, atol=1e-4)
    _, expected = choose_experts(logits, rule)
    found = torch.gather(logits, 1, ids.long())
    highest = torch.topk(logits, rule.top).values
    assert torch.allclose(found, highest, atol=0.1)
    assert all(len(set(row)) == rule.top for row in ids.tolist())
    assert torch.allclose(weights, expected, atol=0.1)


def test_a_row_that_is_not_a_number_gets_distinct_experts() -> None:
    """A padding row of a captured step must not put an expert into a list twice."""
    hidden = torch.full((2, 64), float("nan"), device=DEVICE).to(HALF)
    weight, router = torch.ones(64, device=DEVICE).to(HALF), torch.ones(6, 64, device=DEVICE)

    _, ids, _ = normalise_and_choose(
        hidden, (weight, EPSILON), router.to(HALF), None, RoutingRule(top=4)
    )

    assert [len(set(row)) for row in ids.tolist()] == [4, 4]


def test_large_routers_and_prompts_use_gemms() -> None:
    few, many = torch.empty(4, 8, device=DEVICE), torch.empty(300, 8, device=DEVICE)

    assert fits(few, torch.empty(32, 8, device=DEVICE))
    assert not fits(few, torch.empty(33, 8, device=DEVICE))
    assert not fits(many, torch.empty(32, 8, device=DEVICE))


@pytest.mark.parametrize("size", [32, 96, 2880])
def test_a_norm_adds_a_bias_first(size: int) -> None:
    hidden = torch.randn(5, size, device=DEVICE).to(HALF)
    added = torch.randn(size, device=DEVICE).to(HALF)
    weight = torch.rand(size, device=DEVICE).to(HALF)
    summed = hidden + added

    normed = rows.norm(hidden, weight, EPSILON, added)

    exact = torch.rms_norm(summed.float(), [size], weight.float(), EPSILON)
    assert torch.equal(hidden, summed)
    assert torch.allclose(normed.float(), exact, rtol=4e-3, atol=1e-4)
