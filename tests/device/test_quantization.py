"""Quantised weights: each format gives the weights it was made from, or is refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.device.families import check_served
from headwater.device.model import load
from headwater.device.quantization.checkpoint import QuantizedCheckpoint
from headwater.device.quantization.expert_names import expert_layers
from headwater.device.quantization.schemes import quantization_of
from headwater.errors import ModelError
from tests.device.driver import Driver
from tests.device.families import prompt
from tests.device.quantized_models import FORMATS, compressed, pack_quantized, write_quantized


@pytest.fixture
def written(family: Any, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A tiny Llama in a format, and the plain model it represents."""
    return lambda name: write_quantized(family("llama"), tmp_path, *FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_identifies_its_weights(
    name: str, written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Every weight is equal bit for bit, the tokens are the same, and there is one log line."""
    quantized, plain = written(name)
    with caplog.at_level(logging.INFO):
        model = load(quantized, packed=False)
    expected = load(plain, packed=False)

    ours, theirs = model.module.state_dict(), expected.module.state_dict()
    assert ours.keys() == theirs.keys()
    for part, weight in theirs.items():
        assert torch.equal(ours[part], weight), part
    assert sum("dequantised at load" in line for line in caplog.messages) == 1
    assert model.fingerprint != expected.fingerprint
    outputs = []
    for each in (model, expected):
        driver = Driver(each)
        sequence = driver.add(prompt(21))
        driver.finish(sequence, count=8)
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("has_zeros", [False, True])
def test_packed_integers_are_read_as_compressed_tensors_reads_them(has_zeros: bool) -> None:
    """The library that defines the format reads the same integers independently."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    parts, whole = pack_quantized(weight, has_zeros=has_zeros)

    codes = helpers.unpack_from_int32(parts["weight_packed"], 4, weight.shape).float()
    scale = parts["weight_scale"].repeat_interleave(32, 1)
    zeros: Any = 0
    if has_zeros:
        shape = torch.Size(parts["weight_scale"].shape)
        zeros = helpers.unpack_from_int32(parts["weight_zero_point"], 4, shape, packed_dim=0)
        zeros = zeros.float().repeat_interleave(32, 1)

    assert torch.equal((codes - zeros) * scale, whole)


def test_experts_are_joined_after_they_are_dequantised(family: Any, tmp_path: Path) -> None:
    """transformers joins the weights of a mixture's experts into one, for which they must be
    plain."""
    quantized, plain = write_quantized(
        family("qwen3_moe"), tmp_path, *FORMATS["ct-fp8-channel"]
    )

    ours, theirs = load(quantized, packed=False), load(plain, packed=False)

    for part, weight in theirs.module.state_dict().items():
        assert torch.equal(ours.module.state_dict()[part], weight), part


def test_experts_are_found_by_their_names() -> None:
    """The experts of a layer are one mixture, in the order of their numbers, under both kinds of names;
    a mixture without one of its parts is left out."""
    qwen = [
        f"m.1.mlp.experts.{n}.{part}_proj" for part in ("down", "gate", "up") for n in (1, 0)
    ]
    mixtral = [f"m.2.block_sparse_moe.experts.0.{part}" for part in ("w1", "w2", "w3")]
    partial = ["m.3.mlp.experts.0.down_proj", "m.3.mlp.experts.0.up_proj"]
    others = ["m.1.mlp.shared_experts.gate_proj", "m.1.self_attn.q_proj"]

    first, second = expert_layers([*qwen, *partial, *others, *mixtral])

    assert first.module == "m.1.mlp.experts"
    assert first.up == ("m.1.mlp.experts.0.up_proj", "m.1.mlp.experts.1.up_proj")
    assert set(first.names) == set(qwen)
    assert second.module == "m.2.mlp.experts"
    assert second.names == (mixtral[0], mixtral[2], mixtral[1])


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("ct-fp8-channel", {f"{Q}.weight_scale": None}, f"{Q}.weight has no scales"),
        (
            "ct-fp8-channel",
            {f"{Q}.weight_scale": torch.ones(3, 1)},
            f"{Q}.weight_scale has the shape 3x1",
        ),
        (
            "ct-fp8-channel",
            {f"{Q}.weight_scale": torch.full((64, 1), float("nan"))},
            f"{Q}.weight_scale has scales that are not finite",
        ),
        ("fp8-block", {f"{Q}.weight_scale_inv": torch.ones(2, 2)}, "weight_scale_inv has"),
        ("gptq", {f"{Q}.scales": None}, f"{Q}.qweight needs {Q}.scales"),
        ("gptq", {f"{Q}.qzeros": torch.ones(1, 8).int()}, f"{Q}.qzeros has the shape 1x8"),
        ("gptq", {f"{Q}.g_idx": torch.full((64,), 9).int()}, f"{Q}.g_idx refers to groups"),
        ("gptq", {f"{Q}.qweight": torch.ones(8, 64).long()}, "must be of type I32, got I64"),
        (
            "awq",
            {f"{Q}.qweight": torch.ones(60, 8).int()},
            "not a multiple of the group size 32",
        ),
        (
            "ct-int4",
            {f"{Q}.weight_shape": torch.tensor([64, 60])},
            f"{Q}.weight_shape gives the shape",
        ),
        ("ct-int4-zeros", {f"{Q}.weight_zero_point": None}, f"needs {Q}.weight_zero_point"),
        ("ct-int4", {f"{Q}.weight_packed": None}, "scales for a weight that is not quantised"),
        ("ct-int4", {"model.odd": torch.ones(2).int()}, "model.odd is of type I32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, change: dict[str, Any], why: str, written: Any
) -> None:
    """Missing scales, wrong shapes and wrong types are refused before anything is served."""
    folder, _ = written(name)
    tensors = load_file(folder / "model.safetensors")
    for part, value in change.items():
        tensors.pop(part, None)
        if value is not None:
            tensors[part] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=why.replace(".", r"\.")):
        load(folder)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a": 1}}, "dynamic"),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 32,
                "checkpoint_format": "marlin",
            },
            "marlin",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "cannot be read"),
        (
            compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
            "int-quantized.*int8",
        ),
        (
            compressed(
                "nvfp4-pack-quantized",
                {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            ),
            "nvfp4-pack-quantized",
        ),
    ],
)
def test_schemes_that_are_not_served_are_refused_by_name(
    config: dict[str, Any], why: str
) -> None:
    """The configuration alone decides, before a weight is read."""
    whole = {"model_type": "llama", "quantization_config": config}

    def refuse() -> None:
        check_served(whole)
        quantization_of(whole)

    with pytest.raises(ModelError, match=why):
        refuse()


def test_a_config_that_does_not_cover_a_layer_names_it(written: Any) -> None:
    """The targets of a group leave out a layer that is stored quantised."""
    folder, _ = written("ct-int4")
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = ["re:.*mlp.*"]
    quantization = quantization_of(config)
    assert quantization is not None

    with pytest.raises(ModelError, match=r"self_attn.*is stored as 'pack-quantized'"):
        QuantizedCheckpoint(folder, quantization)


def test_quantised_weights_without_a_config_are_refused(written: Any) -> None:
    """Without the refusal, e4m3 codes would be used as weights."""
    folder, _ = written("fp8-tensor")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match="F8_E4M3, but config"):
        load(folder)


def test_a_truncated_file_is_refused(written: Any) -> None:
    """A file is truncated when its download ended early."""
    folder, _ = written("gptq")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])

    with pytest.raises(ModelError, match="truncated"):
        load(folder)
