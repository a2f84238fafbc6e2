"""Which experts each token goes to, and which tokens each expert gets; all on the device.

Lists have room for every token at every expert, so nothing has to be sorted or summed over
experts, and no size is needed on the host.

    ids      row 0: e3 e7   row 1: e7 e1        pair = row * top + position
    lists    e1: 3 . .   e3: 0 . .   e7: 1 2 .  pairs of each expert, in the order of rows
"""

from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwater.device.kernels.early import (
    MAX_EARLY_EXPERT_ROWS,
    start_early,
    starts_early,
)

_BLOCK = 1024


class RouterScore(IntEnum):
    """How router logits become scores."""

    SOFTMAX = 0
    """Softmax over all experts."""

    SIGMOID = 1
    """Sigmoid of each; a correction is added for the choice but not to the weights."""

    SOFTMAX_OF_TOP = 2
    """Softmax over the chosen experts' logits."""


class GroupScore(IntEnum):
    """The score of a group of experts."""

    BEST_TWO = 0
    """The sum of its best two."""

    BEST = 1


class RoutingRule(NamedTuple):
    """How experts are chosen from a row of router logits."""

    top: int
    score: RouterScore = RouterScore.SOFTMAX
    renormalise: bool = False
    """Divide the weights of the chosen experts by their sum."""

    scale: float = 1.0
    correction: Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of the best groups are chosen."""

    group_score: GroupScore = GroupScore.BEST_TWO


class Routing(NamedTuple):
    """The experts of each row, and the pairs of each expert."""

    ids: Tensor
    """`[rows, top]`, int32."""

    weights: Tensor
    """`[rows, top]`, float32."""

    lists: Tensor
    """`[experts, rows]`, int32: pairs `row * top + position`."""

    counts: Tensor
    """`[experts]`, int32: length of each list."""


@triton.jit
def _best_groups(choice, expert, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
                 GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr,
                 BY_BEST: tl.constexpr):  # fmt: skip
    """`choice` with negative infinity outside the best groups."""
    group_of = expert // (EXPERTS // GROUPS)
    group = tl.arange(0, GROUPS_WIDTH)
    scores = tl.full([GROUPS_WIDTH], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        mine = tl.where(group_of == number, choice, float("-inf"))
        score = tl.max(mine, 0)
        if not BY_BEST:
            at = tl.min(tl.where((mine == score) & (group_of == number), expert, WIDTH), 0)
            score += tl.max(tl.where(expert == at, float("-inf"), mine), 0)
        scores = tl.where(group == number, score, scores)
    taken = tl.where(group < GROUPS, 0, 1)
    kept = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(taken == 0, scores, float("-inf")), 0)
        at = tl.min(tl.where((scores == best) & (taken == 0), group, GROUPS_WIDTH), 0)
        taken = tl.where(group == at, 1, taken)
        kept = kept | (group_of == at)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _choose(logits, correction, ids, weights, scale, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
            TOP: tl.constexpr, TOP_WIDTH: tl.constexpr, SCORE: tl.constexpr,
            CORRECTED: tl.constexpr, RENORMALISED: tl.constexpr, GROUPS: tl.constexpr,
            GROUPS_WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_BEST: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    values = tl.load(logits + row * EXPERTS + expert, mask=known, other=float("-inf"))
    choose_of_row(
        values.to(tl.float32), row, correction, ids, weights, scale, EXPERTS, WIDTH, TOP,
        TOP_WIDTH, SCORE, CORRECTED, RENORMALISED, GROUPS, GROUPS_WIDTH, TOP_GROUPS, BY_BEST,
    )  # fmt: skip


@triton.jit
def choose_of_row(values, row, correction, ids, weights, scale, EXPERTS: tl.constexpr,
                  WIDTH: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr,
                  SCORE: tl.constexpr, CORRECTED: tl.constexpr, RENORMALISED: tl.constexpr,
                  GROUPS: tl.constexpr, GROUPS_WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr,
                  BY_BEST: tl.constexpr) -> None:  # fmt: skip
    """Store ids and weights of the experts of one row from its logits."""
    expert = tl.arange(0, WIDTH)
    known = expert < EXPERTS
    values = tl.where(known, values, float("-inf"))
    scores = values
    if SCORE == 0:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    if SCORE == 1:
        scores = tl.where(known, tl.sigmoid(values), float("-inf"))
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + expert, mask=known, other=0.0)
    # Rows that only pad a captured step may hold NaN. They too get distinct experts, or a list
    # of pairs would overflow.
    choice = tl.where(known & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(
            choice, expert, EXPERTS, WIDTH, GROUPS, GROUPS_WIDTH, TOP_GROUPS, BY_BEST
        )
    position = tl.arange(0, TOP_WIDTH)
    found = tl.full([TOP_WIDTH], float("-inf"), tl.float32)
    for number in tl.static_range(TOP):
        best = tl.max(choice, 0)
        # The first of equals. Where only -infinity is left, all are equal, so experts are
        # distinct in any case.
        at = tl.min(tl.where((choice == best) & known, expert, EXPERTS - 1), 0)
        tl.store(ids + row * TOP + number, at)
        score = tl.max(tl.where(expert == at, scores, float("-inf")), 0)
        found = tl.where(position == number, score, found)
        choice = tl.where(expert == at, float("-inf"), choice)
        known = known & (expert != at)
    if SCORE == 2:
        powers = tl.exp(found - tl.max(found, 0))
        found = powers / tl.sum(powers, 0)
    inside = position < TOP
    if RENORMALISED:
        found = found / (tl.sum(tl.where(inside, found, 0.0), 0) + 1e-20)
    tl.store(weights + row * TOP + position, found * scale, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "capacity"])
def _list_pairs(ids, lists, counts, num_pairs, capacity, BLOCK: tl.constexpr,
                EARLY: tl.constexpr):  # fmt: skip
    start_early(EARLY)
    expert = tl.program_id(0)
    count = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert
        # A running count instead of an atomic one, so that the order does not depend on timing.
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(lists + expert * capacity + place, pair, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, count)


def choose_experts(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Ids and weights of the experts of each row of router logits, `[rows, experts]`."""
    rows, experts = logits.shape
    ids = torch.empty((rows, rule.top), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, rule.top), dtype=torch.float32, device=logits.device)
    early = starts_early(logits)
    _choose[(rows,)](
        logits, logits if rule.correction is None else rule.correction, ids, weights,
        **rule_arguments(rule, experts), EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return ids, weights


def rule_arguments(rule: RoutingRule, experts: int) -> dict[str, Any]:
    """The arguments of `choose_of_row` that depend on the model."""
    return {
        "scale": rule.scale,
        "EXPERTS": experts,
        "WIDTH": triton.next_power_of_2(experts),
        "TOP": rule.top,
        "TOP_WIDTH": triton.next_power_of_2(rule.top),
        "SCORE": int(rule.score),
        "CORRECTED": rule.correction is not None,
        "RENORMALISED": rule.renormalise,
        "GROUPS": rule.num_groups,
        "GROUPS_WIDTH": triton.next_power_of_2(rule.num_groups),
        "TOP_GROUPS": rule.top_groups,
        "BY_BEST": rule.group_score is GroupScore.BEST,
    }


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    """The experts of each row, and the pairs of each expert."""
    return list_pairs(*choose_experts(logits, rule), logits.shape[1])


def list_pairs(ids: Tensor, weights: Tensor, experts: int) -> Routing:
    """The pairs of each expert, from ids and weights of the experts of each row."""
    rows = len(ids)
    lists = torch.empty((experts, rows), dtype=torch.int32, device=ids.device)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    block = min(_BLOCK, max(16, triton.next_power_of_2(ids.numel())))
    early = starts_early(ids, most=MAX_EARLY_EXPERT_ROWS)
    _list_pairs[(experts,)](
        ids, lists, counts, ids.numel(), rows, BLOCK=block, EARLY=early, launch_pdl=early
    )
    return Routing(ids, weights, lists, counts)
