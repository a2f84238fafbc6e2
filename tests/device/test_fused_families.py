"""The fused decoder gives the tokens of `generate` for every family, in Triton's interpreter.

`test_gpu_families.py` compares them on a GPU, where attention and graphs are the GPU's too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.families import NOT_FUSED, SERVED
from headwater.device.model import load
from tests.device.driver import Driver
from tests.device.families import Reference, assert_same_tokens, prompt, save_family
from tests.device.gpu import IS_INTERPRETED, pytestmark, require_kernels

require_kernels()
if not IS_INTERPRETED:
    pytest.skip("test_gpu_families.py has these comparisons on a GPU", allow_module_level=True)

from headwater.device.gpu.decoder import RowsToCompute, TokenSlots  # noqa: E402 - it imports Triton
from tests.device.fused import fused, scratch_pool  # noqa: E402

__all__ = ["pytestmark"]

COUNT = 6
FUSED = sorted(SERVED - NOT_FUSED)


@pytest.mark.parametrize("name", FUSED)
def test_tokens_equal_generate(name: str, family: Callable[[str], Path]) -> None:
    """Whole and chunked, cached and uncached, decoded together, preempted and computed again."""
    model = fused(load(family(name), packed=False))
    assert model is not None
    driver = Driver(model, block_tokens=4)
    whole, chunked = (driver.add(prompt(17, seed=1), name=name) for name in ("one", "two"))
    driver.step((whole, 17), (chunked, 5))
    cached = driver.add(prompt(17, seed=1), name="cached", shared=whole.slots[:3])
    driver.step((chunked, 9), (whole, 1), (cached, 5))
    driver.finish(whole, chunked, cached, count=3)
    driver.free(chunked)
    chunked.num_computed = 0  # preempted: all of its tokens are computed again
    driver.finish(whole, chunked, cached, count=COUNT)

    expected, gaps = Reference(family(name)).generate(prompt(17, seed=1), COUNT)
    for sequence in (whole, chunked, cached):
        assert_same_tokens(sequence.output, expected, gaps)


@pytest.mark.parametrize("name", ["llama", "cohere2", "phi", "flex_olmo", "afmoe", "axk1"])
def test_the_last_layer_of_some_rows_equals_that_of_all(
    name: str, family: Callable[[str], Path]
) -> None:
    """Only sampled rows are computed in the last layer, also where the MLP or a gate reads the
    input of the layer."""
    model = fused(load(family(name), packed=False))
    assert model is not None
    decoder: Any = model.module.decoder
    rows = torch.tensor([2, 8])
    with torch.inference_mode():
        hidden = decoder.embed(*(torch.arange(9).int(), torch.full((9,), -1), torch.arange(9)))
        places = TokenSlots(torch.arange(9).int(), torch.zeros(9, dtype=torch.int32))
        pool = scratch_pool(model, 1, block_tokens=9)

        def attend(number: int, packed: Tensor, variant: Variant) -> Tensor:
            """Attention in which every row sees all stored keys."""
            query = packed.view(len(packed), -1, pool.shape[-1])[:, : decoder.heads]
            key, value = pool[0, number, 0], pool[0, number, -1, ..., : model.value_dim]
            groups = decoder.heads // key.shape[1]
            scores = torch.einsum("thd,khd->htk", query, key.repeat_interleave(groups, 1))
            weights = (scores * variant.scaling).softmax(-1)
            out = torch.einsum("htk,khd->thd", weights, value.repeat_interleave(groups, 1))
            return out.reshape(len(packed), -1)

        expected = decoder.run(hidden.clone(), places, pool, attend)[rows]
        wanted = RowsToCompute(rows, attend)
        ours = decoder.run(hidden.clone(), places, pool.zero_(), attend, wanted=wanted)

    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_layers_without_rotary_embedding_are_fused(tmp_path: Path) -> None:
    """A model whose layers differ from each other, like a published SmolLM3, gives the tokens
    of `generate`."""
    folder = save_family("smollm3", tmp_path, no_rope_layers=[1, 0])
    model = fused(load(folder, packed=False))
    assert model is not None
    driver = Driver(model)
    sequence = driver.add(prompt(17, seed=3))

    driver.finish(sequence, count=COUNT)

    assert_same_tokens(sequence.output, *Reference(folder).generate(prompt(17, seed=3), COUNT))


@pytest.mark.parametrize(
    ("name", "changed"),
    [("phi", {"qk_layernorm": True}), ("cohere", {"use_qk_norm": True}), ("longcat_flash", {})],
)
def test_a_model_with_unknown_parts_is_not_fused(
    name: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Such a model runs in its own code instead of giving wrong tokens."""
    assert fused(load(save_family(name, tmp_path, **changed), packed=False)) is None
