"""The norm before a mixture of experts, its router and the choice of experts, in one kernel.

With up to a few hundred rows, each of these takes as long as its launch. A program computes one row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import (
    MAX_EARLY_EXPERT_ROWS,
    start_early,
    starts_early,
)
from headwater.device.kernels.routing import RoutingRule, choose_of_row, rule_arguments

MAX_ROWS = 256
"""With more rows, reading the router for each of them takes longer than a GEMM."""

_MAX_EXPERTS = 32
"""Maximum number of experts: the sums of all experts are in registers."""

_INPUTS = 512
"""Inputs per iteration."""


@triton.jit
def _inputs(place, added, norm_weight, at, SIZE: tl.constexpr, ADDED: tl.constexpr,
            KIND: tl.constexpr):  # fmt: skip
    """Elements of a row plus `added`, rounded as they are stored, and of the norm's weight."""
    inside = at < SIZE
    values = tl.load(place + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        extra = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        values = (values + extra).to(KIND).to(tl.float32)
    return values, tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normalise_and_choose(
    hidden, added, norm_weight, router, router_bias, correction, normed, ids, weights, epsilon,
    scale, SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ADDED: tl.constexpr,
    BIASED: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr,
    TOP_WIDTH: tl.constexpr, SCORE: tl.constexpr, CORRECTED: tl.constexpr,
    RENORMALISED: tl.constexpr, GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BY_BEST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0)
    place = hidden + row.to(tl.int64) * SIZE
    kind: tl.constexpr = hidden.dtype.element_ty
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    sums = tl.zeros([WIDTH, K], tl.float32)
    squares = tl.zeros([K], tl.float32)
    next_values, next_weighting = _inputs(
        place, added, norm_weight, tl.arange(0, K), SIZE, ADDED, kind
    )
    # The scale of the norm is one number, so it is applied to the sums.
    for first in tl.range(0, SIZE, K, num_stages=3):
        at = first + tl.arange(0, K)
        inside = at < SIZE
        w = tl.load(
            router + expert[:, None] * SIZE + at[None, :],
            mask=known[:, None] & inside[None, :],
            other=0.0,
        )
        # The row is read one iteration ahead: loads of few numbers are not pipelined.
        values, weighting = next_values, next_weighting
        next_values, next_weighting = _inputs(
            place, added, norm_weight, at + K, SIZE, ADDED, kind
        )
        squares += values * values
        values = values * weighting
        sums += w.to(tl.float32) * values[None, :]
    of_row = tl.rsqrt(tl.sum(squares, 0) / SIZE + epsilon)
    logits = tl.sum(sums, 1) * of_row
    if BIASED:
        logits += tl.load(router_bias + expert, mask=known, other=0.0).to(tl.float32)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values, weighting = _inputs(place, added, norm_weight, at, SIZE, ADDED, kind)
    tl.debug_barrier()  # all threads have read the row, which is overwritten now
    if ADDED:
        tl.store(place + at, values, mask=inside)
    tl.store(normed + row.to(tl.int64) * SIZE + at, values * of_row * weighting, mask=inside)
    # Every warp gets all logits. Otherwise each maximum of them would wait for all warps.
    logits = logits.to(router.dtype.element_ty).to(tl.float32)
    of_expert = expert[:, None] == expert[None, :]
    logits = tl.sum(tl.where(of_expert, logits[:, None], 0.0), 0)
    choose_of_row(
        logits, row, correction, ids, weights, scale,
        EXPERTS, WIDTH, TOP, TOP_WIDTH, SCORE, CORRECTED, RENORMALISED, GROUPS, GROUPS_WIDTH,
        TOP_GROUPS, BY_BEST,
    )  # fmt: skip


def fits(hidden: Tensor, router: Tensor) -> bool:
    """Whether `normalise_and_choose` supports this router, and is faster for these rows."""
    return len(hidden) <= MAX_ROWS and len(router) <= _MAX_EXPERTS


def normalise_and_choose(
    hidden: Tensor,
    norm: tuple[Tensor, float],
    router: Tensor,
    router_bias: Tensor | None,
    rule: RoutingRule,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows, and ids and weights of their experts. First `added` is added to each row
    of `hidden`, in place."""
    rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    ids = torch.empty((rows, rule.top), dtype=torch.int32, device=hidden.device)
    weights = torch.empty((rows, rule.top), dtype=torch.float32, device=hidden.device)
    early = starts_early(hidden, most=MAX_EARLY_EXPERT_ROWS)
    _normalise_and_choose[(rows,)](
        hidden, hidden if added is None else added, norm[0], router,
        router if router_bias is None else router_bias,
        router if rule.correction is None else rule.correction, normed, ids, weights, norm[1],
        SIZE=size, K=min(_INPUTS, triton.next_power_of_2(size)),
        BLOCK=triton.next_power_of_2(size), ADDED=added is not None,
        BIASED=router_bias is not None, **rule_arguments(rule, len(router)), EARLY=early,
        num_warps=8, launch_pdl=early,
    )  # fmt: skip
    return normed, ids, weights
