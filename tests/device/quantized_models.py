"""Tiny models in each quantised format, with the plain weights that they represent.

The writers here follow the formats' own descriptions and use loops over nibbles where the code
under test uses shifts of whole tensors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]
"""The tensors of a linear layer in a format, and the dequantised weight."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8 = torch.float8_e4m3fn


def write_quantized(
    source: Path, folder: Path, layer: Callable[[Tensor], Written], config: dict[str, Any]
) -> tuple[Path, Path]:
    """The model of `source` with its linear layers quantised, and the same dequantised."""
    quantized, plain = folder / "quantized", folder / "plain"
    stored: Tensors = {}
    whole: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            parts, weight = layer(weight)
            stored |= {
                name.removesuffix("weight") + part: value.contiguous()
                for part, value in parts.items()
            }
        else:
            stored[name] = weight
        whole[name] = weight.contiguous()
    for target, tensors in ((quantized, stored), (plain, whole)):
        target.mkdir()
        for file in source.iterdir():
            if file.suffix == ".json":
                (target / file.name).write_text(file.read_text())
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((quantized / "config.json").read_text())
    settings["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(settings))
    return quantized, plain


def fp8_tensor(weight: Tensor) -> Written:
    """One scale for the whole tensor."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(FP8)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return parts, codes.float() * scale


def fp8_channel(weight: Tensor) -> Written:
    """A scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_blocks(weight: Tensor, size: int = 24) -> Written:
    """A scale for each block; the last blocks are not full."""
    outputs, inputs = weight.shape
    down, across = -(-outputs // size), -(-inputs // size)
    scales, codes, whole = torch.zeros(down, across), torch.zeros_like(weight), weight.clone()
    for r in range(down):
        for c in range(across):
            at = slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size)
            scales[r, c] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[r, c]).to(FP8).float()
            whole[at] = codes[at] * scales[r, c]
    return {"weight": codes.to(FP8), "weight_scale_inv": scales}, whole


def int4_codes(weight: Tensor, group: int, *, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 0 to 15, and float16 scales and zeros, one each for a group of inputs."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    if has_zeros:
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)
    else:
        scale = (parts.abs().amax(-1) / 7).half().float()
        zero = torch.full_like(scale, 8)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scale, zero.int()


def whole_of(codes: Tensor, scale: Tensor, zero: Tensor, group_of: Tensor) -> Tensor:
    """The weight that the codes represent."""
    return (codes - zero[:, group_of]) * scale[:, group_of]


def packed(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight values in an integer along `dim`, nibble i from position `order[i]`."""
    moved = values.movedim(dim, -1)
    out = torch.zeros((*moved.shape[:-1], moved.shape[-1] // 8), dtype=torch.int64)
    for nibble, place in enumerate(order):
        out |= moved[..., place::8].long() << (4 * nibble)
    return out.to(torch.int32).movedim(-1, dim)


def gptq(weight: Tensor, *, group: int = 32, offset: int = 1, ordered: bool = True) -> Written:
    """Codes packed along the inputs. `offset` is subtracted from zero points: 1 in GPTQ's first
    format."""
    inputs = weight.shape[1]
    group_of = torch.arange(inputs) // group
    turn = torch.arange(inputs)
    if not ordered:
        turn = torch.randperm(inputs, generator=torch.Generator().manual_seed(0))
    codes, scale, zero = int4_codes(weight[:, turn], group, has_zeros=True)
    back = turn.argsort()
    codes, group_of = codes[:, back], group_of[back]
    parts = {
        "qweight": packed(codes.T, 0),
        "qzeros": packed((zero - offset).T, 1),
        "scales": scale.T.half(),
        "g_idx": group_of.int(),
    }
    return parts, whole_of(codes, scale, zero, group_of)


def awq(weight: Tensor, *, group: int = 32) -> Written:
    """Codes packed along the outputs, in AWQ's order."""
    codes, scale, zero = int4_codes(weight, group, has_zeros=True)
    parts = {
        "qweight": packed(codes.T, 1, AWQ_ORDER),
        "qzeros": packed(zero.T, 1, AWQ_ORDER),
        "scales": scale.T.half(),
    }
    return parts, whole_of(codes, scale, zero, torch.arange(weight.shape[1]) // group)


def pack_quantized(weight: Tensor, *, group: int = 32, has_zeros: bool = False) -> Written:
    """Codes packed along the inputs, as compressed-tensors stores them."""
    codes, scale, zero = int4_codes(weight, group, has_zeros=has_zeros)
    parts = {
        "weight_packed": packed(codes, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        parts["weight_zero_point"] = packed(zero, 0)
    return parts, whole_of(codes, scale, zero, torch.arange(weight.shape[1]) // group)


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_FLOAT8 = {"num_bits": 8, "type": "float"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "fp8-tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [24, 24]}),
    "ct-fp8-channel": (
        fp8_channel,
        compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}),
    ),
    "ct-fp8-block": (
        lambda w: _renamed(fp8_blocks(w)),
        compressed(
            "float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [24, 24]}
        ),
    ),
    "gptq": (gptq, _GPTQ),
    "gptq-act-order": (lambda w: gptq(w, ordered=False), {**_GPTQ, "desc_act": True}),
    "gptq-v2": (lambda w: gptq(w, offset=0), {**_GPTQ, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "ct-int4": (pack_quantized, compressed("pack-quantized", _INT4)),
    "ct-int4-zeros": (
        lambda w: pack_quantized(w, has_zeros=True),
        compressed("pack-quantized", {**_INT4, "symmetric": False}),
    ),
}
"""By name: how a layer is written, and the configuration."""


def _renamed(written: Written) -> Written:
    parts, whole = written
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, whole
