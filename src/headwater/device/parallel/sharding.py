"""Splits the weights of a model over ranks, and adds the collectives that the model then needs.

    attention   q, k, v: heads of this rank     output: matching columns, results summed
    latent KV   heads of this rank; the latent is computed and stored on every rank
    MLP         gate, up: part of the rows      down: matching columns, results summed
    experts     every expert is split like an MLP; the router is on every rank
    embedding   part of the vocabulary, results summed      output layer: logits joined on rank 0

`split` only cuts weights, so what follows (packing, moving to a device) sees ordinary modules
that compute partial results. `connect` adds the collectives afterwards. Layers are recognised
by the names of their parts. A layer with unknown parts is refused, because its result would be
wrong.

transformers' own `tp_plan` names the same splits but has no rule for fewer KV heads than ranks,
and gathers Q, K and V of families with joint projections on every rank, KV included. So the names
are used, and the plan is not.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwater.device.fused_layer import FusedLayer
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.share import Range, RankShare
from headwater.errors import ModelError

_INPUTS = ("qkv_proj", "q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "dense")
"""Names of the linear layers before attention, and of the one after it."""

_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
)
"""Names of the layers of an MLP: those before the activation, then the one after it."""

_WHOLE = ("gate", "router", "shared_expert_gate")
"""Linear layers in a block of experts that every rank has completely."""

_HEAD_COUNTS = ("num_heads", "num_attention_heads")
_EXPERT_SIZES = ("intermediate_dim", "intermediate_size", "expert_dim")


class SplitEmbedding(nn.Module):
    """A part of the vocabulary. The embedding of other tokens is zero, and the results of all
    ranks are summed."""

    def __init__(self, inner: nn.Embedding, share: RankShare) -> None:
        super().__init__()
        self.start, self.end = share.part(inner.num_embeddings)
        self.inner = inner
        self.group: RankGroup | None = None
        inner.weight = _parameter(inner.weight[self.start : self.end])
        inner.num_embeddings = self.end - self.start
        inner.padding_idx = None

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mine = (tokens >= self.start) & (tokens < self.end)
        found = self.inner((tokens - self.start).clamp(0, self.end - self.start - 1))
        found = found * mine[..., None]
        return found if self.group is None else self.group.sum(found)


class SplitNorm(nn.Module):
    """A root-mean-square norm over the heads of all ranks, as OLMo 2 has for Q and K."""

    def __init__(self, norm: nn.Module, mine: Range, copies: int) -> None:
        super().__init__()
        weight = cast(Tensor, norm.weight)
        self._total = weight.shape[0]
        self._copies = copies
        self.weight = _parameter(weight[mine[0] : mine[1]])
        self.epsilon = float(
            cast(Any, getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
        )
        self.group: RankGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.group is not None:
            squares = self.group.sum(squares) / self._copies
        normed = wide * torch.rsqrt(squares / self._total + self.epsilon)
        return (self.weight * normed).to(x.dtype)


def split(module: nn.Module, share: RankShare) -> None:
    """Cut the weights of `module` to this rank's part, in place."""
    parts: Any = module
    config = parts.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    for layer in parts.model.layers:
        attention, block = _parts_of(layer)
        if hasattr(attention, "kv_b_proj"):
            _split_latent_attention(attention, share, heads=heads)
        else:
            _split_attention(attention, share, heads=heads, kv_heads=kv_heads)
        _split_block(block, share)
    _split_vocabulary(parts, share)


def own_heads(module: nn.Module) -> int:
    """Query heads on this rank."""
    parts: Any = module
    attention = getattr(parts.model.layers[0], "self_attn", None)
    config = getattr(attention, "config", None) or parts.config
    return int(config.num_attention_heads)


def connect(module: nn.Module, group: RankGroup) -> None:
    """Add the collectives to a model that was split."""
    parts: Any = module
    for layer in parts.model.layers:
        if isinstance(layer, FusedLayer):
            layer.sum_ranks = group.sum
            continue
        attention, block = _parts_of(layer)
        output = next(name for name in _OUTPUTS if hasattr(attention, name))
        _sum_after(getattr(attention, output), group)
        _sum_after(block, group)
    for part in module.modules():
        if isinstance(part, SplitEmbedding | SplitNorm):
            part.group = group
    total = int(parts.config.vocab_size)
    parts.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, logits: group.join_columns(logits, total)
    )


def _parts_of(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The attention of a decoder layer, and the MLP or block of experts after it."""
    children = {
        name: child
        for name, child in layer.named_children()
        if any(True for _ in child.children()) and not _is_norm(child)
    }
    attention = [
        name
        for name, child in children.items()
        if any(hasattr(child, output) for output in _OUTPUTS)
    ]
    blocks = [name for name in children if name not in attention]
    if len(attention) != 1 or len(blocks) != 1:
        raise _unknown(layer, ", ".join(children))
    return children[attention[0]], children[blocks[0]]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _split_attention(module: nn.Module, share: RankShare, *, heads: int, kv_heads: int) -> None:
    parts: Any = module
    for name, part in module.named_children():
        if isinstance(part, nn.Linear) and name not in (*_INPUTS, *_OUTPUTS):
            raise _unknown(module, name)
    size = int(parts.head_dim)
    first, end = share.heads(heads)
    kv_first, kv_end = share.kv_heads(kv_heads)
    mine, kv_mine = (first * size, end * size), (kv_first * size, kv_end * size)
    if hasattr(parts, "qkv_proj"):
        query, key = heads * size, kv_heads * size
        _keep_rows(
            parts.qkv_proj,
            mine,
            _shifted(kv_mine, query),
            _shifted(kv_mine, query + key),
        )
    else:
        for name, wanted in (("q_proj", mine), ("k_proj", kv_mine), ("v_proj", kv_mine)):
            _keep_rows(_linear(parts, name), wanted)
    output = next((name for name in _OUTPUTS if hasattr(parts, name)), None)
    if output is None:
        raise _unknown(module, "no output projection")
    _keep_columns(_linear(parts, output), mine, share)
    _split_norm(parts, "q_norm", (first, end), size, copies=1)
    _split_norm(parts, "k_norm", (kv_first, kv_end), size, copies=share.copies(kv_heads))
    if isinstance(getattr(parts, "sinks", None), Tensor):
        parts.sinks = _parameter(parts.sinks[first:end])
    _set_head_counts(parts, end - first, kv_end - kv_first)


def _split_latent_attention(module: nn.Module, share: RankShare, *, heads: int) -> None:
    """Keep the heads of this rank. The projections to the latent, and the latent itself, are on
    every rank."""
    parts: Any = module
    first, end = share.heads(heads)
    query = "q_b_proj" if parts.q_lora_rank is not None else "q_proj"
    value = int(parts.v_head_dim)
    for name, size in (
        (query, int(parts.qk_head_dim)),
        ("kv_b_proj", int(parts.qk_nope_head_dim) + value),
    ):
        _keep_rows(_linear(parts, name), (first * size, end * size))
    _keep_columns(_linear(parts, "o_proj"), (first * value, end * value), share)
    _set_head_counts(parts, end - first, end - first)


def _set_head_counts(attention: Any, heads: int, kv_heads: int) -> None:  # noqa: ANN401 - a module of transformers'
    """Set the head counts of this rank for model code that reads them."""
    config = copy.copy(attention.config)
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    attention.config = config
    for name in _HEAD_COUNTS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, heads)
    if isinstance(getattr(attention, "num_key_value_heads", None), int):
        attention.num_key_value_heads = kv_heads
    if isinstance(getattr(attention, "num_key_value_groups", None), int):
        attention.num_key_value_groups = heads // kv_heads


def _split_norm(attention: Any, name: str, mine: Range, size: int, *, copies: int) -> None:  # noqa: ANN401 - as above
    """Split a norm. A norm of single heads is unchanged; the weights of a norm per head are
    cut; a norm over all heads becomes a sum over ranks."""
    norm = getattr(attention, name, None)
    weight = getattr(norm, "weight", None)
    if norm is None or not isinstance(weight, Tensor) or weight.shape == (size,):
        return
    if weight.dim() == 2:
        norm.weight = _parameter(weight[mine[0] : mine[1]])
        return
    setattr(attention, name, SplitNorm(norm, (mine[0] * size, mine[1] * size), copies))


def _split_block(block: nn.Module, share: RankShare) -> None:
    """Cut every MLP and every expert below `block`; all other parts must be known to be
    unsplit."""
    done: set[nn.Module] = set()
    for part in block.modules():
        if _split_experts(part, share):
            done.add(part)
        else:
            done.update(_split_mlp(part, share))
    if not done:
        raise _unknown(block, "no MLP")
    for name, part in block.named_modules():
        is_known = part in done or name.rpartition(".")[2] in _WHOLE
        # A norm inside would see partial results.
        if (isinstance(part, nn.Linear) and not is_known) or _is_norm(part):
            raise _unknown(block, name)


def _split_mlp(module: nn.Module, share: RankShare) -> list[nn.Module]:
    """The linear layers that were cut; empty if `module` is not an MLP."""
    parts: Any = module
    if hasattr(parts, "gate_up_proj") and isinstance(parts.gate_up_proj, nn.Linear):
        inner = parts.gate_up_proj.out_features // 2
        mine = share.part(inner)
        _keep_rows(parts.gate_up_proj, mine, _shifted(mine, inner))
        _keep_columns(parts.down_proj, mine, share)
        return [parts.gate_up_proj, parts.down_proj]
    for names in _MLPS:
        found = [getattr(parts, name, None) for name in names]
        if all(isinstance(part, nn.Linear) for part in found):
            *wide, narrow = cast(list[nn.Linear], found)
            mine = share.part(narrow.in_features)
            for part in wide:
                _keep_rows(part, mine)
            _keep_columns(narrow, mine, share)
            return [*wide, narrow]
    return []


def _split_experts(module: nn.Module, share: RankShare) -> bool:
    """Cut each expert like an MLP. Returns whether `module` holds experts."""
    parts: Any = module
    gate_up, down = getattr(parts, "gate_up_proj", None), getattr(parts, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3:
        return False
    bias = getattr(parts, "gate_up_proj_bias", None)
    if bias is not None:  # GPT-OSS: inputs first, gate and up interleaved
        inner = down.shape[1]
        start, end = share.part(inner)
        parts.gate_up_proj = _parameter(gate_up[:, :, 2 * start : 2 * end])
        parts.gate_up_proj_bias = _parameter(bias[:, 2 * start : 2 * end])
        parts.down_proj = _parameter(down[:, start:end])
        if not share.is_first:
            parts.down_proj_bias = _parameter(torch.zeros_like(parts.down_proj_bias))
    else:
        inner = down.shape[2]
        start, end = share.part(inner)
        both = (gate_up[:, start:end], gate_up[:, inner + start : inner + end])
        parts.gate_up_proj = _parameter(torch.cat(both, dim=1))
        parts.down_proj = _parameter(down[:, :, start:end])
    for name in _EXPERT_SIZES:
        if getattr(parts, name, None) == inner:
            setattr(parts, name, end - start)
    return True


def _split_vocabulary(model: Any, share: RankShare) -> None:  # noqa: ANN401 - a model of transformers'
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    split_embedding = SplitEmbedding(embedding, share)
    model.set_input_embeddings(split_embedding)
    if head.weight.shape[0] != model.config.vocab_size:
        raise _unknown(
            head, f"{head.weight.shape[0]} rows for {model.config.vocab_size} tokens"
        )
    _keep_rows(head, share.part(head.weight.shape[0]))
    if is_tied:
        head.weight = split_embedding.inner.weight


def _linear(parent: Any, name: str) -> nn.Linear:  # noqa: ANN401 - a module of transformers'
    found = getattr(parent, name, None)
    if type(found) is not nn.Linear:
        raise _unknown(parent, name)
    return found


def _keep_rows(linear: nn.Linear, *wanted: Range) -> None:
    """Keep these outputs of a linear layer."""
    weights = [linear.weight[start:end] for start, end in wanted]
    linear.weight = _parameter(weights[0] if len(weights) == 1 else torch.cat(weights))
    if linear.bias is not None:
        linear.bias = _parameter(torch.cat([linear.bias[start:end] for start, end in wanted]))
    linear.out_features = linear.weight.shape[0]


def _keep_columns(linear: nn.Linear, wanted: Range, share: RankShare) -> None:
    """Keep these inputs. The ranks' results are summed, so only one of them adds the bias."""
    linear.weight = _parameter(linear.weight[:, wanted[0] : wanted[1]])
    linear.in_features = wanted[1] - wanted[0]
    if not share.is_first:
        linear.register_parameter("bias", None)


def _shifted(wanted: Range, by: int) -> Range:
    return wanted[0] + by, wanted[1] + by


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach(), requires_grad=False)


def _sum_after(module: nn.Module, group: RankGroup) -> None:
    def add(_module: nn.Module, _inputs: object, output: Any) -> Any:  # noqa: ANN401 - a tensor, or a tuple that begins with it
        if isinstance(output, tuple):
            return (group.sum(output[0]), *output[1:])
        return group.sum(output)

    module.register_forward_hook(add)


def _unknown(module: nn.Module, what: str) -> ModelError:
    return ModelError(
        f"{type(module).__name__} cannot be split over ranks (unknown: {what}); serve this "
        "model with --tensor-parallel-size 1"
    )
