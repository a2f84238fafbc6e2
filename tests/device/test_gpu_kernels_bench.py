"""The part `kernels` of `headwater bench gpu`, and the bounds of models with experts."""

import sys
import weakref
from typing import Any

import pytest
import torch

from headwater.device.model import LoadedModel
from tests.device.gpu import DEVICE, HALF, pytestmark, require_kernels

require_kernels()

from headwater.bench import _gpu_engine, _gpu_kernels, _gpu_moe, _gpu_quant  # noqa: E402 - Triton below
from headwater.bench._gpu_shapes import SHAPES  # noqa: E402
from headwater.device.gpu import moe  # noqa: E402
from headwater.device.gpu.mlp import RmsNorm  # noqa: E402
from headwater.device.kernels.experts import ExpertWeights  # noqa: E402
from headwater.device.kernels.routing import RoutingRule  # noqa: E402

__all__ = ["pytestmark"]


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that the interpreter can compute, and no FlashInfer."""
    small = {
        "DEVICE": DEVICE,
        "DTYPE": HALF,
        "HEADS": 4,
        "KV_HEADS": 2,
        "DIM": 32,
        "DECODES": ((1, 100), (3, 130)),
        "PREFILLS": ((70, 0), (20, 600)),
        "_graph_ms": lambda attend: float(attend().isfinite().all()),
    }
    for name, value in small.items():
        monkeypatch.setattr(_gpu_kernels, name, value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)


@pytest.mark.usefixtures("small_cells")
def test_without_flashinfer_our_kernels_are_measured_alone() -> None:
    """The report says that FlashInfer was skipped, and has no ratio."""
    found = _gpu_kernels.measure_kernels(is_quick=False)

    assert found["flashinfer"].startswith("skipped:")
    assert found["failed"] == []
    assert "lowest_ratio" not in found
    for name in ("decode_1x100", "decode_3x130", "prefill_70_after_0", "prefill_20_after_600"):
        assert found[name]["ours_ms"] == 1.0


@pytest.mark.usefixtures("small_cells")
def test_a_failing_cell_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cell has its error in the report, and is listed as failed."""
    monkeypatch.setattr(_gpu_kernels, "DECODES", ((1, 100), (-1, 130)))

    found = _gpu_kernels.measure_kernels(is_quick=False)

    assert found["failed"] == ["decode_-1x130"]
    assert "error" in found["decode_-1x130"]
    assert found["prefill_20_after_600"]["ours_ms"] == 1.0


def test_packed_experts_have_as_many_products_as_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flop bound of a prompt counts weights, and not their bytes: in MXFP4 an expert has a
    quarter of the bytes and the same products."""
    monkeypatch.setattr(_gpu_engine, "DEVICE", DEVICE)
    config = SHAPES["gpt-oss-20b"]()
    config.hidden_size = config.intermediate_size = 64
    config.num_hidden_layers, config.num_local_experts, config.vocab_size = 1, 4, 64
    config.layer_types = config.layer_types[:1]
    model = _gpu_engine.random_model(config)
    plain_bytes, _, _ = _gpu_moe._expert_bytes(model)
    plain = _gpu_moe._expert_numbers(model)
    _gpu_quant.pack_experts(model)
    packed_bytes, _, _ = _gpu_moe._expert_bytes(model)

    assert plain == _gpu_moe._expert_numbers(model) == 3 * 64 * 64
    assert packed_bytes / plain_bytes == pytest.approx(17 / 64)


def tiny(name: str, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A random model of the benchmark with two small layers."""
    monkeypatch.setattr(_gpu_engine, "DEVICE", DEVICE)
    config = SHAPES[name]()
    config.hidden_size = config.intermediate_size = config.moe_intermediate_size = 128
    config.num_hidden_layers, config.num_experts, config.vocab_size = 2, 8, 64
    config.num_local_experts = 8
    if name == "gpt-oss-20b":
        config.layer_types = config.layer_types[:2]
    return _gpu_engine.random_model(config)


def test_random_rows_are_routed_to_many_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases of a random model are zeros. With ones, all rows would be nearly equal, and so would
    their experts."""
    model = tiny("gpt-oss-20b", monkeypatch)

    parameters = dict(model.module.named_parameters())
    layer = "model.layers.0."
    assert not parameters[layer + "self_attn.o_proj.bias"].any()
    assert not parameters[layer + "mlp.router.bias"].any()
    assert (parameters[layer + "input_layernorm.weight"] == 1).all()
    assert parameters[layer + "mlp.router.weight"].std() > 0.01


@pytest.mark.parametrize("method", ["fp8_block", "fp8_channel"])
def test_experts_are_quantised_layer_by_layer(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a layer's experts is free before the next layer is converted, and nothing is
    kept for gradients."""
    model = tiny("qwen3-30b-a3b", monkeypatch)
    module: Any = model.module
    layers = module.model.layers
    plain = [weakref.ref(layer.mlp.experts) for layer in layers]
    convert, kept = _gpu_quant._in_fp8, []

    def counted(experts: Any, method: str) -> Any:
        kept.append(sum(ref() is not None for ref in plain))
        return convert(experts, method)

    monkeypatch.setattr(_gpu_quant, "_in_fp8", counted)
    _gpu_quant.quantize_experts(model, method)

    assert kept == [2, 1]
    for layer in layers:
        assert not layer.mlp.experts.weights.gate_up_scales.requires_grad


@pytest.mark.parametrize("experts", [4, 40])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_experts_are_counted_in_every_path(rows: int, experts: int) -> None:
    """One row, few and several, with a router inside a kernel and with a GEMM."""
    block = moe.MoeBlock(
        router=torch.randn(experts, 64, device=DEVICE).to(HALF),
        router_bias=None,
        rule=RoutingRule(top=2),
        experts=ExpertWeights(
            gate_up=torch.randn(experts, 128, 64, device=DEVICE).to(HALF),
            down=torch.randn(experts, 64, 64, device=DEVICE).to(HALF),
        ),
        shared=None,
        shared_gate=None,
        shared_scale=1.0,
    )
    hidden = torch.randn(rows, 64, device=DEVICE).to(HALF)
    norm = RmsNorm(torch.ones(64, device=DEVICE).to(HALF), 1e-5)

    with _gpu_moe._recorded(rows) as counts:
        moe.add_moe(block, hidden, norm, None, is_eager=True)

    assert len(counts) == 1
    assert 2 <= int(counts[0]) <= 2 * rows
