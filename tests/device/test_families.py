"""Every served family gives, token for token, the output of transformers' own `generate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

from headwater.device.builtin import LlamaShape, make_llama
from headwater.device.families import SERVED, check_served, max_positions
from headwater.device.model import load
from headwater.device.packing import pack
from headwater.device.survey import survey
from headwater.errors import ModelError
from tests.device.driver import Driver
from tests.device.families import (
    FAMILIES,
    Reference,
    assert_same_tokens,
    prompt,
    quantize_experts,
    save_family,
)

COUNT = 16


def test_every_served_family_is_tested() -> None:
    """Every family that is served is compared with `generate`."""
    assert set(FAMILIES) == SERVED


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SERVED))
def test_tokens_equal_generate(name: str, family: Any) -> None:
    """Windows, soft-caps, sinks and scalings are honoured: prompts longer than the window,
    decoded together and in chunks, give the tokens of the unchanged model."""
    reference, model = Reference(family(name)), load(family(name))
    driver = Driver(model, block_tokens=4)
    long, short = prompt(41, seed=1), prompt(6, seed=2)
    sequences = [driver.add(long, name="long"), driver.add(short, name="short")]
    alone = Driver(model, block_tokens=4, contiguous_bytes=0)
    chunked = alone.add(long, name="chunked")

    driver.finish(*sequences, count=COUNT)
    for size in (5, 20, 16):
        alone.step((chunked, size))
    alone.finish(chunked, count=COUNT)

    expected, gaps = reference.generate(long, COUNT)
    assert len(set(expected)) > COUNT // 2, "a model that repeats itself proves little"
    assert_same_tokens(sequences[0].output, expected, gaps)
    assert_same_tokens(chunked.output, expected, gaps)
    assert_same_tokens(sequences[1].output, *reference.generate(short, COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SERVED))
def test_a_survey_without_torch_agrees_with_the_loaded_model(name: str, family: Any) -> None:
    """`headwater check` reports what is served: the same layout, type and context."""
    folder = family(name)
    (folder / "tokenizer.json").write_text("{}")

    model, found = load(folder, packed=False), survey(folder)

    assert found.layout(16) == model.layout(16)
    assert found.max_model_len == model.max_model_len
    loaded = sum(weight.nbytes for weight in model.module.parameters())
    assert found.weight_bytes == pytest.approx(loaded, rel=1e-3), "buffers are not counted"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SERVED))
def test_tokens_equal_generate_when_packed(name: str, family: Any) -> None:
    """Every linear layer, gate and norm is in its packed form, in every family."""
    model = load(family(name), packed=False)
    assert pack(model.module, min_packed_weights=0)
    driver = Driver(model, block_tokens=4)
    sequence = driver.add(prompt(25, seed=3))

    driver.finish(sequence, count=COUNT)

    assert_same_tokens(
        sequence.output, *Reference(family(name)).generate(prompt(25, seed=3), COUNT)
    )


@pytest.mark.slow
def test_four_bit_experts_are_turned_back_to_the_serving_dtype(tmp_path: Path) -> None:
    """Published gpt_oss weights are mxfp4; they are served as `generate` reads them."""
    quantize_experts(save_family("gpt_oss", tmp_path))
    model = load(tmp_path)
    driver = Driver(model)
    sequence = driver.add(prompt(25, seed=3))

    driver.finish(sequence, count=COUNT)

    assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}
    reference = Reference(tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    assert_same_tokens(sequence.output, *reference.generate(prompt(25, seed=3), COUNT))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba"}, "recurrent"),
        ({"model_type": "jamba"}, "recurrent"),
        ({"model_type": "brandnew", "layer_types": ["linear_attention"]}, "recurrent"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "deepseek_v32", "kv_lora_rank": 512}, "indexer"),
        ({"model_type": "brandnew", "index_topk": 64}, "indexer"),
        ({"model_type": "brandnew", "kv_lora_rank": 512}, "not been tested"),
        ({"model_type": "llama4_text"}, "chunks"),
        ({"model_type": "gemma3"}, "multimodal"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "later tokens"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"model_type": "brandnew"}, "not been tested"),
        ({}, "model_type"),
    ],
)
def test_an_unsupported_model_is_refused_with_the_reason(
    config: dict[str, Any], why: str
) -> None:
    """A model whose results would be wrong is refused before it is loaded."""
    with pytest.raises(ModelError, match=why):
        check_served(config)


def test_kimi_k2_is_served_as_the_deepseek_model_it_is(tmp_path: Path) -> None:
    """Published configs name a type that transformers knows as deepseek_v3."""
    reference = Reference(save_family("deepseek_v3", tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    driver = Driver(load(tmp_path))
    sequence = driver.add(prompt(25, seed=3))

    driver.finish(sequence, count=COUNT)

    assert_same_tokens(sequence.output, *reference.generate(prompt(25, seed=3), COUNT))


def test_longrope_is_limited_to_the_length_where_frequencies_change() -> None:
    """Beyond that length, one long sequence would change the KV of all others in the batch."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}

    assert max_positions({"max_position_embeddings": 131072}, rope) == 4096
    assert (
        max_positions({"max_position_embeddings": 131072}, {"rope_type": "default"}) == 131072
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """The message says what is missing or wrong."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "reshaped", "cut"])
def test_weights_that_are_not_whole_are_refused(damage: str, tmp_path: Path) -> None:
    """A missing weight is an error: transformers would make it random (lesson 61)."""
    shape = LlamaShape(layers=1, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8)
    path = make_llama(tmp_path, shape) / "model.safetensors"
    weights = load_file(path)
    if damage == "missing":
        del weights["model.layers.0.self_attn.q_proj.weight"]
    if damage == "reshaped":
        weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 4), dtype=np.float32)
    save_file(weights, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])

    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)
