"""The part of a decoder layer after attention, for a mixture of experts.

The router, the choice of experts and the experts' GEMMs are queued without reading from the
device, so they can be captured. The weights of the transformers module are used in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.device.gpu.fp8_experts import Fp8Experts
from headwater.device.gpu.mlp import (
    MAX_GEMM_ROWS,
    DenseMLP,
    RankSum,
    RmsNorm,
    activated,
    add_linear,
    dense,
    normed,
)
from headwater.device.gpu.packed_experts import PackedExperts
from headwater.device.kernels import mx_experts, rows
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.expert_choice import fits as fits_router
from headwater.device.kernels.expert_choice import normalise_and_choose
from headwater.device.kernels.expert_groups import add_grouped
from headwater.device.kernels.expert_pairs import MAX_PAIR_ROWS, add_pairs
from headwater.device.kernels.experts import ExpertWeights
from headwater.device.kernels.gemv import fits, gemv, has_aligned_lines
from headwater.device.kernels.quantized import Code
from headwater.device.kernels.routing import (
    GroupScore,
    RouterScore,
    RoutingRule,
    choose_experts,
    list_pairs,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeBlock:
    """A router, its experts, and shared experts for every token."""

    router: Tensor
    """`[experts, size]`; in float32 if the model computes its scores in float32."""

    router_bias: Tensor | None
    rule: RoutingRule
    experts: ExpertWeights
    shared: DenseMLP | None
    shared_gate: Tensor | None
    """`[1, size]`: its sigmoid is the weight of the shared experts."""

    shared_scale: float
    """Factor of the results of shared experts."""


def add_moe(
    block: MoeBlock,
    hidden: Tensor,
    norm: RmsNorm | None,
    output_norm: RmsNorm | None,
    *,
    is_eager: bool,
    ranks: RankSum | None = None,
    added: Tensor | None = None,
) -> None:
    """Add the experts' results for normalised rows of `hidden` to `hidden` in place; the results
    are normalised first if `output_norm` is given. With `ranks`, each rank has a part of every
    expert, and the sum of their results is added. Before all that, `added` is added to each row;
    it is only given without `output_norm` and `ranks`."""
    for part in hidden.split(MAX_GEMM_ROWS):
        if output_norm is not None:
            result = torch.zeros_like(part)
            _add(block, part, result, norm, is_eager=is_eager)
            if ranks is not None:
                result = ranks.sum(result)
            rows.add_normed(result, *output_norm, part)
            continue
        if ranks is None:
            _add(block, part, part, norm, added, is_eager=is_eager)
            continue
        source = part.clone()
        if not ranks.is_first:
            part.zero_()
        _add(block, source, part, norm, is_eager=is_eager)
        ranks.sum(part)


def _add(
    block: MoeBlock,
    source: Tensor,
    hidden: Tensor,
    norm: RmsNorm | None,
    added: Tensor | None = None,
    *,
    is_eager: bool,
) -> None:
    """Add the results for rows of `source` to `hidden`, which may be the same tensor. Before
    that, `added` is added to each row of `source`."""
    if _is_one_row(block, hidden):
        if added is not None:
            source += added
        _add_one(block, source, hidden, norm)
        return
    if norm is not None and fits_router(source, block.router):
        x, ids, weights = normalise_and_choose(
            source, norm, block.router, block.router_bias, block.rule, added
        )
    else:
        x = normed(source, norm, added)
        ids, weights = choose_experts(_logits(block, x), block.rule)
    if len(hidden) <= MAX_PAIR_ROWS and not _is_exact(block.experts, hidden):
        _pairs(block.experts)(x, hidden, block.experts, ids, weights)
    else:
        grouped = mx_experts.add_grouped if block.experts.is_mxfp4 else add_grouped
        grouped(x, hidden, block.experts, list_pairs(ids, weights, len(block.router)))
    if block.shared is not None:
        result = dense(block.shared, x, is_eager=is_eager)
        if block.shared_gate is not None:
            result *= torch.mm(x, block.shared_gate.T).sigmoid_()
        hidden.add_(result, alpha=block.shared_scale)


def _logits(block: MoeBlock, x: Tensor) -> Tensor:
    x = x.to(block.router.dtype)
    if block.router_bias is None:
        return torch.mm(x, block.router.T)
    return torch.addmm(block.router_bias.to(x.dtype), x, block.router.T)


def _is_exact(experts: ExpertWeights, hidden: Tensor) -> bool:
    """Whether rows are float32 and the kernels for few rows would round them to 16 bits."""
    return experts.is_mxfp4 and hidden.element_size() == 4


def _is_one_row(block: MoeBlock, hidden: Tensor) -> bool:
    """Whether `_add_one` supports the block: there is one row, `gemv` supports all weights, and
    the shared experts have no gate."""
    if len(hidden) != 1 or block.shared_gate is not None or _is_exact(block.experts, hidden):
        return False
    dense_weights = [] if block.shared is None else [block.shared.up, block.shared.down]
    return has_aligned_lines(block.router) and all(
        not isinstance(weight, Tensor) or fits(weight, 1) for weight in dense_weights
    )


def _add_one(block: MoeBlock, source: Tensor, hidden: Tensor, norm: RmsNorm | None) -> None:
    """`_add` for one row: its norm is computed inside the products that read it."""
    shared = block.shared
    logits = torch.empty((1, len(block.router)), dtype=block.router.dtype, device=hidden.device)
    gemv(source, block.router, bias=block.router_bias, norm=norm, out=logits)
    ids, weights = choose_experts(logits, block.rule)
    narrow = None
    if shared is not None:  # before experts add to `hidden`, which may be the source
        narrow = activated(shared, source, norm, is_eager=False)
    _pairs(block.experts)(source, hidden, block.experts, ids, weights, norm)
    if shared is not None and narrow is not None:
        add_linear(hidden, narrow, shared.down, None, None, block.shared_scale)


def _pairs(experts: ExpertWeights) -> Callable[..., None]:
    return mx_experts.add_pairs if experts.is_mxfp4 else add_pairs


_CORRECTION = "e_score_correction_bias"


def moe_block(module: nn.Module, shared: DenseMLP | None, scale: float) -> MoeBlock | None:
    """The weights of a module with `experts`, whose results are multiplied by `scale`; None if
    its parts are unknown."""
    parts: Any = module
    router = getattr(parts, "gate", getattr(parts, "router", None))
    experts = _experts(parts.experts)
    weight = getattr(getattr(router, "gate", router), "weight", None)
    if experts is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    rule = _rule(parts, router, len(weight))
    if rule is None:
        return None
    bias = getattr(router, "bias", None)
    gate = getattr(parts, "shared_expert_gate", None)
    is_exact = rule.correction is not None or hasattr(router, "topk_method")
    return MoeBlock(
        router=weight.data.float() if is_exact else weight.data,
        router_bias=None if bias is None else bias.data,
        rule=rule._replace(scale=rule.scale * scale),
        experts=experts,
        shared=shared,
        shared_gate=None if gate is None else gate.weight.data,
        shared_scale=scale,
    )


def _rule(block: Any, router: Any, num_experts: int) -> RoutingRule | None:  # noqa: ANN401 - modules of transformers'
    def told(name: str, default: Any) -> Any:  # noqa: ANN401 - a number or a tensor
        return getattr(router, name, getattr(block, name, default))

    top = told("top_k", None)
    if not isinstance(top, int) or not 1 <= top <= num_experts:
        return None
    statics = told("moe_statics", None)  # ERNIE 4.5
    correction = getattr(statics, _CORRECTION, told(_CORRECTION, told("expert_bias", None)))
    if correction is not None:
        return RoutingRule(
            top=top,
            score=RouterScore.SIGMOID if statics is None else RouterScore.SOFTMAX,
            renormalise=bool(told("norm_topk_prob", True)),
            scale=float(told("routed_scaling_factor", told("route_scale", 1.0))),
            correction=correction.data.flatten(),
            num_groups=int(told("num_group", told("n_group", 1)) or 1),
            top_groups=int(told("topk_group", 1) or 1),
        )
    method = told("topk_method", None)
    if method is not None:  # DeepSeek-V2
        is_grouped = method == "group_limited_greedy"
        return RoutingRule(
            top=top,
            scale=float(told("routed_scaling_factor", 1.0)),
            num_groups=int(told("num_group", 1) or 1) if is_grouped else 1,
            top_groups=int(told("topk_group", 1) or 1) if is_grouped else 1,
            group_score=GroupScore.BEST,
        )
    if getattr(router, "bias", None) is not None:
        return RoutingRule(top=top, score=RouterScore.SOFTMAX_OF_TOP)
    return RoutingRule(top=top, renormalise=bool(told("norm_topk_prob", True)))


def _experts(module: Any) -> ExpertWeights | None:  # noqa: ANN401 - a module of transformers'
    if isinstance(module, PackedExperts):
        return _packed_experts(module)
    if isinstance(module, Fp8Experts):
        return module.weights
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3:
        return None
    bias = getattr(module, "gate_up_proj_bias", None)
    if bias is not None:  # GPT-OSS: inputs first, gate and up interleaved, a clamped activation
        return ExpertWeights(
            gate_up=_outputs_first(gate_up),
            down=_outputs_first(down),
            gate_up_bias=bias.data,
            down_bias=module.down_proj_bias.data,
            is_interleaved=True,
            activation=GateActivation.CLAMPED,
            alpha=float(module.alpha),
            limit=float(module.limit),
        )
    if "SiLU" not in type(getattr(module, "act_fn", None)).__name__:
        return None
    return ExpertWeights(gate_up=gate_up.data, down=down.data)


def _packed_experts(module: PackedExperts) -> ExpertWeights:
    return ExpertWeights(
        code=Code.MXFP4,
        gate_up=module.gate_up.codes,
        gate_up_scales=module.gate_up.scales,
        down=module.down.codes,
        down_scales=module.down.scales,
        gate_up_bias=module.gate_up_proj_bias.data,
        down_bias=module.down_proj_bias.data,
        is_interleaved=True,
        activation=GateActivation.CLAMPED,
        alpha=module.alpha,
        limit=module.limit,
    )


def _outputs_first(weight: Tensor) -> Tensor:
    """The weight, contiguous as `[experts, outputs, inputs]`; the parameter becomes a view of
    it."""
    turned = weight.data.transpose(1, 2)
    if not turned.is_contiguous():
        turned = turned.contiguous()
        weight.data = turned.transpose(1, 2)
    return turned
