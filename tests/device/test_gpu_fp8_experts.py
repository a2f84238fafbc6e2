"""Experts in FP8: kernels against float64 over the dequantised weights, and loading."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.device.model_files import read_config
from headwater.device.quantization.expert_names import ExpertLayers
from headwater.device.quantization.matrices import Fp8Matrix, Int4Matrix, QuantizedMatrix
from tests.device.families import save_family
from tests.device.gpu import DEVICE, HALF, pytestmark, require_kernels
from tests.device.quantized_models import FORMATS, fp8_blocks, write_quantized

require_kernels()

from headwater.device.gpu.fp8_experts import (  # noqa: E402 - it imports Triton
    Fp8Experts,
    Fp8ExpertWeight,
    fault_of,
    fp8_experts,
)
from headwater.device.kernels.expert_groups import add_grouped  # noqa: E402
from headwater.device.kernels.expert_pairs import add_pairs  # noqa: E402
from headwater.device.kernels.quantized import quantize_rows  # noqa: E402
from headwater.device.kernels.routing import RoutingRule, choose_experts, route  # noqa: E402
from headwater.device.quantization.loading import load_quantized  # noqa: E402
from headwater.device.quantization.schemes import quantization_of  # noqa: E402

__all__ = ["pytestmark"]

FORMS = ["tensor", "channel", "block"]
EXPERTS, TOP, SIZE, INNER = 4, 2, 160, 144
"""Sizes with incomplete tiles and incomplete blocks of scales."""

LAYERS = ExpertLayers(
    module="mlp.experts",
    gate=tuple(f"{n}.gate" for n in range(EXPERTS)),
    up=tuple(f"{n}.up" for n in range(EXPERTS)),
    down=tuple(f"{n}.down" for n in range(EXPERTS)),
)
ALLOWED = {torch.float32: 1e-5, HALF: 1e-2}


def matrices(form: str) -> dict[str, QuantizedMatrix]:
    """Random matrices by the name of their layer; the scales differ widely."""
    made: dict[str, QuantizedMatrix] = {}
    for name in LAYERS.names:
        shape = (SIZE, INNER) if name.endswith("down") else (INNER, SIZE)
        block = {"tensor": shape, "channel": (1, shape[1]), "block": (128, 128)}[form]
        blocks = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        made[name] = Fp8Matrix(
            codes=(torch.randn(shape) * 16).to(torch.float8_e4m3fn),
            scales=torch.exp2(torch.randn(blocks)) / 200,
            block=block,
        )
    return made


def made_experts(form: str) -> Fp8Experts:
    """Experts whose weights lie between numbers that are NaN."""
    made = fp8_experts(LAYERS, matrices(form).__getitem__, DEVICE)
    assert made is not None, "supported"
    return Fp8Experts(guarded(made.gate_up), guarded(made.down))


def guarded(weight: Fp8ExpertWeight) -> Fp8ExpertWeight:
    codes, scales = weight.codes.view(torch.uint8), weight.scales
    return Fp8ExpertWeight(
        codes=between(codes, 0x7F).view(torch.float8_e4m3fn),
        scales=between(scales, float("nan")),
    )


def between(values: Tensor, guard: float) -> Tensor:
    around = torch.full((values.numel() + 8192,), guard, dtype=values.dtype, device=DEVICE)
    around[4096:-4096] = values.flatten()
    return around[4096:-4096].view(values.shape)


def exact(
    experts: Fp8Experts, rows: Tensor, ids: Tensor, shares: Tensor, *, is_rounded: bool = False
) -> Tensor:
    """Float64 over the dequantised weights, and over rounded inputs of each product if
    `is_rounded`."""
    out = torch.zeros(rows.shape, dtype=torch.float64, device=DEVICE)
    given = rounded(rows) if is_rounded else rows.double()
    for expert in range(EXPERTS):
        row, place = torch.where(ids == expert)
        gate, up = (given[row] @ plain(experts.gate_up, expert).T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        if is_rounded and len(row):
            inner = rounded(inner.to(rows.dtype))
        result = inner @ plain(experts.down, expert).T
        out.index_add_(0, row, result * shares[row, place, None].double())
    return out


def rounded(rows: Tensor) -> Tensor:
    """As the FP8 tensor cores get them; the interpreter rounds some numbers to e4m3 wrongly."""
    codes, scales = quantize_rows(rows)
    return codes.double() * scales.double()


def plain(weight: Fp8ExpertWeight, expert: int) -> Tensor:
    return weight.plain(expert, torch.float32).double()


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("form", FORMS)
def test_experts_have_the_published_weights(form: str) -> None:
    """Gate, up and down of every expert are those of its matrices, bit for bit."""
    given = matrices(form)
    made = fp8_experts(LAYERS, given.__getitem__, DEVICE)
    assert made is not None

    for n in range(EXPERTS):
        gate, up, down = (
            given[f"{n}.{part}"].dequantize(torch.float32).to(DEVICE)
            for part in ("gate", "up", "down")
        )
        assert torch.equal(made.gate_up.plain(n, torch.float32), torch.cat((gate, up)))
        assert torch.equal(made.down.plain(n, torch.float32), down)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("form", FORMS)
def test_few_rows(form: str, dtype: torch.dtype, rows: int) -> None:
    """Results of normalised rows are added; inputs are not rounded. Nothing outside the weights
    is read."""
    experts = made_experts(form)
    x = torch.randn(rows, SIZE, device=DEVICE).to(dtype)
    norm = torch.rand(SIZE, device=DEVICE).to(dtype), 1e-5
    hidden = torch.randn(rows, SIZE, device=DEVICE).to(dtype)
    before = hidden.double()
    logits = torch.randn(rows, EXPERTS, device=DEVICE)
    ids, shares = choose_experts(logits, RoutingRule(top=TOP))

    add_pairs(x, hidden, experts.weights, ids, shares, norm)

    normed = torch.rms_norm(x.double(), [SIZE], norm[0].double(), norm[1])
    assert error(hidden, before + exact(experts, normed, ids, shares)) < ALLOWED[dtype]


@pytest.mark.parametrize("rows", [7, 40, 60, 200])
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str, dtype: torch.dtype, rows: int) -> None:
    """Tiles of 16, 32, 64 and 128 rows are right, with several tiles for one expert and with
    none for another."""
    experts = made_experts(form)
    x = torch.randn(rows, SIZE, device=DEVICE).to(dtype)
    hidden = torch.zeros_like(x)
    logits = torch.randn(rows, EXPERTS, device=DEVICE)
    logits[:, 1], logits[:, 3] = 9.0, -9.0
    routing = route(logits, RoutingRule(top=TOP))

    add_grouped(x, hidden, experts.weights, routing)

    is_rounded = form != "block" and dtype != torch.float32
    found = exact(experts, x, routing.ids, routing.weights, is_rounded=is_rounded)
    assert error(hidden, found) < ALLOWED[dtype]


@pytest.mark.parametrize(
    ("form", "dtype"), [("tensor", torch.float32), ("channel", torch.float32), ("block", HALF)]
)
def test_kernels_that_are_right_have_no_fault(form: str, dtype: torch.dtype) -> None:
    """Every form of the products is tried, and the results are within rounding."""
    assert fault_of(made_experts(form), TOP, dtype) is None


def test_kernels_that_disagree_are_not_used() -> None:
    """The results of kernels are compared with those of dequantised weights. A kernel that does
    not run is a fault, too."""
    experts = made_experts("block")
    experts.down = Fp8ExpertWeight(codes=experts.down.codes, scales=experts.down.scales * 1.1)
    assert "differ by 0.0909" in str(fault_of(experts, TOP, torch.float32))

    experts.down = Fp8ExpertWeight(
        codes=experts.down.codes, scales=experts.down.scales[..., :1]
    )
    assert str(fault_of(experts, TOP, torch.float32)).startswith("RuntimeError")


def test_matrices_without_a_kernel_are_not_kept() -> None:
    """Other sizes of blocks, other formats, and experts that differ are dequantised."""
    given = matrices("block")
    fp8, name = given["3.up"], "3.up"
    assert isinstance(fp8, Fp8Matrix)
    others: list[QuantizedMatrix] = [
        Fp8Matrix(codes=fp8.codes, scales=torch.ones(INNER, 1), block=(1, SIZE)),
        Int4Matrix(codes=fp8.codes.view(torch.uint8), scales=fp8.scales, zeros=None),
    ]
    for other in others:
        assert fp8_experts(LAYERS, {**given, name: other}.__getitem__, DEVICE) is None
    small = {
        name: Fp8Matrix(codes=each.codes, scales=torch.ones(10, 10), block=(16, 16))
        for name, each in given.items()
    }
    assert fp8_experts(LAYERS, small.__getitem__, DEVICE) is None


@pytest.mark.parametrize(
    ("family_name", "form"),
    [("qwen3_moe", "ct-fp8-channel"), ("mixtral", "fp8-block"), ("deepseek_v3", "fp8-block")],
)
def test_a_mixture_keeps_its_experts(
    family_name: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts in FP8 replace those of transformers, which never get memory, and the model's own
    code computes the same with them."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    source = save_family(family_name, tmp_path / "source", **sizes)
    write, config = FORMATS[form]
    if form == "fp8-block":
        write, config = (
            lambda w: fp8_blocks(w, 128),
            {**config, "weight_block_size": [128, 128]},
        )
    folder, _ = write_quantized(source, tmp_path, write, config)
    quantization = quantization_of(read_config(folder))
    assert quantization is not None
    caplog.set_level(logging.INFO)

    kept, plain = (
        load_quantized(folder, quantization, torch.float32, kept_on=device)[0].eval()
        for device in (DEVICE, None)
    )

    found = [m for m in kept.modules() if isinstance(m, Fp8Experts)]
    assert len(found) == (1 if family_name == "deepseek_v3" else 2)
    assert "failed" not in caplog.text
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        ours, theirs = (m.to(DEVICE)(tokens.to(DEVICE)).logits for m in (kept, plain))
    assert error(ours, theirs.double()) < 1e-5
