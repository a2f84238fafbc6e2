"""The norms of a decoder layer, taken from a transformers module.

What a norm computes is found by trying it, not by its name.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.device.gpu.mlp import LayerNorm, Norm, RmsNorm
from headwater.device.kernels.rotary import HeadNorms

_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", None, "input_layernorm", None),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
"""Names of the norms before attention, after it, before the MLP and after it, in the families.
Where the first and the third are the same, attention and MLP are parallel."""

_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
_FINAL_NORMS = ("norm", "final_layernorm")


class LayerNorms(NamedTuple):
    """The norms of a layer."""

    before_attention: Norm | None
    after_attention: RmsNorm | None
    before_mlp: Norm | None
    after_mlp: RmsNorm | None
    is_parallel: bool


def layer_norms(layer: nn.Module, config: Any) -> LayerNorms | None:  # noqa: ANN401 - a configuration of transformers'
    """The norms of a layer; None if they are unknown."""
    device = next(layer.parameters()).device
    ones = torch.ones(config.hidden_size, dtype=config.dtype, device=device)
    parts = {n: part for n, part in layer.named_children() if n.endswith("layernorm")}
    found = {name: norm_of(part, ones) for name, part in parts.items()}
    names = next((form for form in _NORMS if set(form) - {None} == set(found)), None)
    if names is None or None in found.values():
        return None
    before, after, before_mlp, after_mlp = (found.get(str(name)) for name in names)
    if isinstance(after, LayerNorm) or isinstance(after_mlp, LayerNorm):
        return None
    is_parallel = before is not None and names[0] == names[2]
    return LayerNorms(before, after, before_mlp, after_mlp, is_parallel)


def qk_norms(attention: Any) -> tuple[HeadNorms | None, HeadNorms | None]:  # noqa: ANN401 - a module of transformers'
    """Norms of single heads of Q and K, and norms over all of Q and all of K."""
    for names in _HEAD_NORMS:
        both = [getattr(attention, name, None) for name in names]
        if None in both:
            continue
        ones = torch.ones(attention.head_dim, device=next(attention.parameters()).device)
        query, key = (rms_norm_of(norm, ones) for norm in both)
        if query is None or key is None:
            continue
        norms = HeadNorms(query.weight, key.weight, query.epsilon)
        return (norms, None) if len(query.weight) == attention.head_dim else (None, norms)
    return None, None


def norm_of(norm: nn.Module | None, ones: Tensor | None = None) -> Norm | None:
    """The weights of a norm; None if it is unknown. Some norms multiply by their weight plus
    one, some subtract the mean; this is found by trying the norm. `ones` are the weights of a
    norm that has none."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    like = ones if weight is None else weight
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-5))
    if norm is None or like is None or like.dim() != 1 or not isinstance(epsilon, float):
        return None
    # Their mean is not zero, or subtracting it would make no difference.
    x = torch.randn(2, len(like), device=like.device, dtype=like.dtype) + 1.0
    expected = norm(x).float()
    plain = torch.rms_norm(x.float(), [len(like)], None, epsilon)
    for candidate in (like.data, like.data.float() + 1.0):
        if _is_close(plain * candidate.float(), expected):
            return RmsNorm(candidate, epsilon)
    given = LayerNorm(data_of(weight), data_of(bias), epsilon)
    if _is_close(torch.layer_norm(x, [len(like)], *given).float(), expected):
        return given
    return None


def rms_norm_of(norm: nn.Module | None, ones: Tensor | None = None) -> RmsNorm | None:
    found = norm_of(norm, ones)
    return found if isinstance(found, RmsNorm) else None


def final_norm(model: nn.Module) -> Norm | None:
    """The norm after the last layer; None if it is unknown."""
    parts: Any = model
    return norm_of(
        first_part(model, _FINAL_NORMS), torch.ones_like(parts.embed_tokens.weight[0])
    )


def first_part(module: nn.Module | None, names: tuple[str, ...]) -> nn.Module | None:
    """The first of these parts that the module has."""
    found = [getattr(module, name, None) for name in names]
    return next((part for part in found if part is not None), None)


def data_of(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.data


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0.02, atol=0.02)
