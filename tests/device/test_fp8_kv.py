"""KV in 8 bits: the stored bytes, and that caching, chunks, tiers and hand-offs change no
token."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.device.fp8_kv import Fp8KVPool, dequantize, quantize
from headwater.device.model import LoadedModel, load
from headwater.launch import peers
from tests.device.driver import Driver
from tests.device.families import prompt
from tests.device.lower_tiers import check_lower_tiers
from tests.disagg.real import TOKEN, RealPair

WHOLE, COUNT = 75, 12


@pytest.fixture(scope="module")
def fp8(llama: LoadedModel) -> LoadedModel:
    return replace(llama, has_fp8_kv=True)


def reference(head: list[float]) -> list[float]:
    """Rounding by the definition of e4m3, one number at a time, in exact arithmetic."""
    top = max(abs(x) for x in head)
    scale = 2.0**-126
    while top > 448 * scale:
        scale *= 2
    rounded = []
    for x in head:
        at = abs(x) / scale
        exponent = max(int(np.floor(np.log2(at))), -6) if at else -6
        step = 2.0 ** (exponent - 3)
        steps = at / step
        low = int(np.floor(steps))
        up = steps - low > 0.5 or (steps - low == 0.5 and low % 2 == 1)
        rounded.append(float(np.copysign((low + up) * step * scale, x)))
    return rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_heads_are_rounded_as_the_format_says(dtype: torch.dtype) -> None:
    """Rounding follows the definition of e4m3 for heads of all magnitudes, with zeros, values
    at the edge of a scale, and very small ones."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.arange(-4, 4).float()[:, None]
    heads = torch.randn((8, 24), generator=generator) * sizes
    heads[0], heads[1, 0], heads[2, :3] = 0.0, 448.0, torch.tensor([449.0, 224.0, 223.9])
    heads = heads.to(dtype)

    numbers, exponents = quantize(heads)
    again = dequantize(numbers, exponents, dtype)

    assert exponents.dtype == torch.uint8
    expected = [reference(head) for head in heads.double().tolist()]
    if dtype != torch.float16:  # small scales are kept within what float16 can hold
        assert again.double().tolist() == expected
    else:
        assert torch.allclose(again.double(), torch.tensor(expected).double(), atol=2e-5)
    assert torch.equal(dequantize(*quantize(again), dtype), again), "rounding twice is once"


def test_a_block_holds_numbers_and_scales_in_one_piece(fp8: LoadedModel) -> None:
    """A number takes one byte, and the scale of each head and token one more; kv_format is not
    that of a 16-bit type."""
    pool = Fp8KVPool(fp8, num_blocks=6, block_tokens=4)
    heads = 2 * fp8.num_layers * 4 * fp8.kv_heads
    keys, values = torch.randn(2, 5, fp8.kv_heads, fp8.head_dim).unbind(0)
    rows = pool.rows_of(np.array([5, 5, 2, 2, 0]), np.array([0, 3, 1, 2, 0]))

    pool.write(rows[1], torch.arange(5), keys, values)
    read_keys, read_values = pool.read(torch.tensor([5, 2, 0]), 1)

    assert pool.blocks.shape[1] == heads * (fp8.head_dim + 1) == fp8.layout(4).block_bytes
    assert replace(fp8, has_fp8_kv=False).layout(4).kv_format != fp8.layout(4).kv_format
    at = torch.tensor([0, 3, 5, 6, 8])
    assert torch.equal(read_keys[at], pool.rounded(keys))
    assert torch.equal(read_values[at], pool.rounded(values))
    assert torch.equal(
        pool.read_whole(torch.tensor([2]))[0, 1, 0, 1:3], pool.rounded(keys)[2:4]
    )
    assert torch.equal(pool.data[5, 1, 0, 3].float() * 1.0, quantize(keys)[0][1].float())
    assert not pool.blocks[1].any()


def outputs(model: LoadedModel, **settings: Any) -> list[list[int]]:
    """A long and a short sequence computed whole and together."""
    driver = Driver(model, **settings)
    both = [driver.add(prompt(n, seed=n), name=str(n)) for n in (WHOLE, 9)]
    driver.finish(*both, count=COUNT)
    return [sequence.output for sequence in both]


def test_chunks_and_caching_change_no_token_with_8_bit_kv(fp8: LoadedModel) -> None:
    """Prompts give the same tokens whole or in chunks, in buffers or alone, in blocks of any
    size, cached or not."""
    expected = outputs(fp8)

    assert outputs(fp8, contiguous_bytes=0) == expected
    assert outputs(fp8, block_tokens=5) == expected
    driver = Driver(fp8)
    cut = driver.add(prompt(WHOLE, seed=WHOLE), name="cut")
    for size in (1, 30, 20, 24):
        driver.step((cut, size))
    found = driver.add(prompt(WHOLE, seed=WHOLE), name="found", shared=cut.slots[:3])
    short = driver.add(prompt(9, seed=9), name="short")
    driver.finish(found, cut, short, count=COUNT)
    assert [cut.output, short.output] == expected
    assert found.output == expected[0]


def test_8_bit_kv_differs_from_kv_in_the_model_dtype(
    llama: LoadedModel, fp8: LoadedModel
) -> None:
    """Rounding has an effect: log-probabilities differ a little."""

    def logits(model: LoadedModel) -> torch.Tensor:
        driver = Driver(model)
        sequence = driver.add(prompt(WHOLE, seed=1))
        kept: list[torch.Tensor] = []
        plain = driver.runner.compute

        def noted(*given: Any) -> torch.Tensor:
            kept.append(plain(*given))
            return kept[-1]

        driver.runner.compute = noted
        driver.step((sequence, WHOLE))
        return kept[0].log_softmax(-1)

    exact, rounded = logits(llama), logits(fp8)
    kl = (exact.exp() * (exact - rounded)).sum()
    assert 0 < kl < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("family_name", ["gemma2", "gpt_oss"])
def test_windows_sinks_and_soft_caps_use_8_bit_kv(family_name: str, family: Any) -> None:
    """Layers with materialised scores also read the stored values."""
    model = replace(load(family(family_name)), has_fp8_kv=True)
    expected = outputs(model, block_tokens=4)

    assert outputs(model, block_tokens=4, contiguous_bytes=0) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("link", "staged"), [("shm", False), ("tcp", True)])
def test_hand_offs_carry_latent_kv(
    link: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same as without a hand-off, with blocks pushed in place and through
    staging buffers."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    if staged:
        monkeypatch.setattr(peers, "_in_place", peers._staged)
    with (
        RealPair(link, kv_cache_dtype="fp8") as pair,
        RealPair(link, kv_cache_dtype="fp8", prefix_caching=False) as plain,
    ):
        pair.converse(plain, random.Random(link))
        assert pair.decode.stats().handoffs["decode"].done == 9


@pytest.mark.slow
def test_lower_tiers_give_back_what_was_stored(tmp_path: Path) -> None:
    """Blocks from host memory and, after a restart, from files give the tokens of an uncached
    run."""
    prompts = [prompt(100, seed=n) % 256 for n in range(4)]
    check_lower_tiers(tmp_path, prompts, kv_cache_dtype="fp8")
