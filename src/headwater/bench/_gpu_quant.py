"""Quantised weights on the GPU: their speed and their error compared with bfloat16."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from headwater.bench._gpu_decode import blocks_for
from headwater.bench._gpu_engine import GpuEngine, make_model, random_model, release_memory
from headwater.bench._gpu_moe import measure_moe
from headwater.bench._gpu_shapes import SHAPES
from headwater.bench._gpu_steps import all_logits, decode_ms, make_runner, prefill_ms
from headwater.device.gpu.fp8_experts import Fp8Experts, fp8_experts
from headwater.device.gpu.packed_experts import PackedExperts, packed_weight
from headwater.device.gpu.quantized import QuantizedLinear, quantized_weight
from headwater.device.model import LoadedModel
from headwater.device.quantization.expert_names import ExpertLayers
from headwater.device.quantization.matrices import Fp8Matrix, Int4Matrix, QuantizedMatrix

METHODS = ("fp8_channel", "int4", "fp8_block")
_CONTEXTS = ((1, 1024), (128, 200), (128, 1024))
_PROMPT = 8192
_CUT_LAYERS = 4
"""Layers of the model whose logits are compared with float32."""

_COMPARED_TOKENS = 512


def measure_quantized(shape: str, found: dict[str, Any], *, is_quick: bool) -> None:
    """Put steps of bfloat16 and of each method, their ratios, and errors of logits into
    `found`."""
    plain = _times(make_model(shape), is_quick=is_quick)
    found |= {"bfloat16": plain, "output_layer": "bfloat16"}
    release_memory()
    for method in METHODS:
        model = make_model(shape)
        quantize_model(model, method)
        release_memory()
        times = _times(model, is_quick=is_quick)
        del model
        release_memory()
        speedup = {name: plain[name] / value for name, value in times.items() if name in plain}
        found[method] = {**times, "speedup": speedup, **_errors(shape, method)}
        release_memory()
        print(f"quant {method}: {found[method]}", file=sys.stderr, flush=True)


def measure_mxfp4(ceilings: dict[str, float], *, is_quick: bool) -> dict[str, Any]:
    """GPT-OSS-20B's shape with packed experts: shares of the roofline of what is really read."""
    batches = [1] if is_quick else [1, 32, 128]
    model = make_model("gpt-oss-20b")
    pack_experts(model)
    release_memory()
    blocks = blocks_for(batches[-1]) + 256
    engine = GpuEngine(model, num_blocks=blocks, max_num_seqs=batches[-1])
    found = measure_moe(model, engine, batches, ceilings)
    found["is_fused"] = engine.runner.is_fused
    engine.close()
    return found


def measure_fp8_experts(
    shape: str, ceilings: dict[str, float], found: dict[str, Any], *, is_quick: bool
) -> None:
    """Measure a mixture with experts in FP8 and all other weights in bfloat16. Put its shares of
    the roofline of what is really read into `found`."""
    batches = [1] if is_quick else [1, 32, 128]
    for method in ("fp8_block", "fp8_channel"):
        model = make_model(shape)
        quantize_experts(model, method)
        release_memory()
        blocks = blocks_for(batches[-1]) + 256
        engine = GpuEngine(model, num_blocks=blocks, max_num_seqs=batches[-1])
        found[method] = measure_moe(model, engine, batches, ceilings)
        found[method]["is_fused"] = engine.runner.is_fused
        engine.close()
        del engine, model
        release_memory()


def _times(model: LoadedModel, *, is_quick: bool) -> dict[str, float]:
    rows = 1 if is_quick else 128
    runner = make_runner(model, rows=rows, tokens=max(rows * 1100, 2 * _PROMPT))
    found = {
        f"decode_{rows}x{context}_ms": decode_ms(runner, rows, context)
        for rows, context in (_CONTEXTS[:1] if is_quick else _CONTEXTS)
    }
    found[f"prefill_{_PROMPT}_ms"] = prefill_ms(runner, _PROMPT)
    assert runner.is_fused, "the fused decoder did not accept the model"
    runner.close()
    return found


def _errors(shape: str, method: str) -> dict[str, float]:
    """Errors of the logits of a model of a few layers, compared with its dequantised weights in
    float32."""
    config = SHAPES[shape]()
    config.num_hidden_layers = _CUT_LAYERS
    torch.manual_seed(1)
    model = random_model(config)
    matrices = quantize_model(model, method)
    exact = random_model(config, torch.float32)
    own = dict(model.module.named_parameters())
    with torch.no_grad():
        for name, weight in exact.module.named_parameters():
            layer = name.removesuffix(".weight")
            source = own.get(name)
            weight.copy_(
                matrices[layer].dequantize(torch.float32) if source is None else source
            )
    tokens = torch.randint(0, config.vocab_size, (_COMPARED_TOKENS,)).tolist()
    ours, theirs = (_logits(each, tokens) for each in (model, exact))
    return {
        "logits_relative_error": float((ours - theirs).norm() / theirs.norm()),
        "greedy_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def _logits(model: LoadedModel, tokens: list[int]) -> Tensor:
    runner = make_runner(model, rows=1, tokens=2 * len(tokens))
    logits = all_logits(runner, tokens).float()
    runner.close()
    return logits


def quantize_model(model: LoadedModel, method: str) -> dict[str, QuantizedMatrix]:
    """Quantise every linear layer except the output layer, in place; return the new layers."""
    matrices: dict[str, QuantizedMatrix] = {}
    layers = [n for n, m in model.module.named_modules() if isinstance(m, nn.Linear)]
    for name in layers:
        if name == "lm_head":
            continue
        layer: Any = model.module.get_submodule(name)
        matrices[name] = quantized_matrix(layer.weight.data, method)
        parent, _, own = name.rpartition(".")
        made = QuantizedLinear(quantized_weight(matrices[name], model.dtype), None)
        setattr(model.module.get_submodule(parent), own, made)
    return matrices


def pack_experts(model: LoadedModel) -> None:
    """Replace every layer's experts by random MXFP4 weights."""
    names = [
        name
        for name, module in model.module.named_modules()
        if hasattr(getattr(module, "experts", None), "gate_up_proj_bias")
    ]
    for layer in names:
        module: Any = model.module.get_submodule(layer)
        experts: Any = module.experts
        made = []
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=model.device)
            scales = torch.full(shape, 119, dtype=torch.uint8, device=model.device)
            made.append(packed_weight(blocks, scales))
        module.experts = PackedExperts(experts, *made)


@torch.no_grad()
def quantize_experts(model: LoadedModel, method: str) -> None:
    """Replace every layer's experts by the same in FP8. The memory of a layer's experts is free
    before the next layer is converted."""
    names = [
        name
        for name, module in model.module.named_modules()
        if isinstance(getattr(getattr(module, "experts", None), "gate_up_proj", None), Tensor)
    ]
    for name in names:
        module: Any = model.module.get_submodule(name)
        module.experts = _in_fp8(module.experts, method)


def _in_fp8(experts: Any, method: str) -> Fp8Experts:  # noqa: ANN401 - a module of transformers'
    names = {
        part: tuple(f"{part}.{n}" for n in range(len(experts.down_proj)))
        for part in ("gate", "up", "down")
    }

    def read(name: str) -> QuantizedMatrix:
        part, _, number = name.partition(".")
        if part == "down":
            return quantized_matrix(experts.down_proj[int(number)], method)
        gate, up = experts.gate_up_proj[int(number)].chunk(2)
        return quantized_matrix(gate if part == "gate" else up, method)

    layers = ExpertLayers(module="experts", **names)
    made = fp8_experts(layers, read, experts.down_proj.device)
    assert made is not None, "the kernels support these sizes"
    return made


def quantized_matrix(weight: Tensor, method: str) -> QuantizedMatrix:
    """A weight quantised by rounding to nearest."""
    exact, size = weight.float(), 128
    outputs, inputs = weight.shape
    if method == "int4":
        groups = exact.view(outputs, -1, size)
        scales = (groups.abs().amax(-1) / 7).to(weight.dtype).float()
        codes = (groups / scales[..., None]).round().clamp(-8, 7).view(outputs, inputs)
        return Int4Matrix(codes=(codes + 8).to(torch.uint8), scales=scales, zeros=None)
    block = (1, inputs) if method == "fp8_channel" else (size, size)
    tiles = exact.view(outputs // block[0], block[0], inputs // block[1], block[1])
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).view(outputs, inputs)
    return Fp8Matrix(codes=codes.to(torch.float8_e4m3fn), scales=scales, block=block)
