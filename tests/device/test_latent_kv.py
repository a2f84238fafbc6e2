"""Latent KV (MLA): the content of a block, and that caching, chunks, tiers and hand-offs keep
it."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.device.fp8_kv import open_pool
from headwater.device.model import LoadedModel, load
from tests.device.driver import Driver
from tests.device.families import Reference, assert_same_tokens, prompt, save_family
from tests.device.lower_tiers import check_lower_tiers
from tests.disagg.real import TOKEN, RealPair

WHOLE, COUNT = 75, 12


@pytest.fixture(scope="module")
def folder(family: Callable[[str], Path]) -> Path:
    return family("deepseek_v3")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def truth(folder: Path) -> tuple[list[int], list[float]]:
    return Reference(folder).generate(prompt(WHOLE), COUNT)


def test_a_token_takes_what_the_architecture_promises(model: LoadedModel) -> None:
    """A token takes one plane of latent and rotary elements per layer, for any number of
    heads."""
    config: Any = model.module.config
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    pool = open_pool(model, num_blocks=4, block_tokens=8)

    assert model.token_bytes == model.num_layers * numbers * model.dtype.itemsize
    assert pool.data.shape == (4, model.num_layers, 1, 8, 1, numbers)
    assert "2x1x8x1x40" in model.layout(8).kv_format


@pytest.mark.parametrize("has_fp8_kv", [False, True])
def test_stored_latents_are_read_back_as_written(model: LoadedModel, has_fp8_kv: bool) -> None:
    """Stored latents are read by layer and as a whole; other slots stay as they were."""
    pool = open_pool(replace(model, has_fp8_kv=has_fp8_kv), num_blocks=6, block_tokens=4)
    latents = torch.randn(5, 1, model.head_dim)
    rows = pool.rows_of(np.array([5, 5, 2, 2, 0]), np.array([0, 3, 1, 2, 0]))

    pool.write(rows[1], torch.arange(5), latents, latents)
    keys, values = pool.read(torch.tensor([5, 2, 0]), 1)

    stored = pool.rounded(latents)
    assert torch.equal(keys[[0, 3, 5, 6, 8]], stored)
    assert torch.equal(values, keys)
    assert torch.equal(pool.read_whole(torch.tensor([2]))[0, 1, 0, 1:3], stored[2:4])
    assert not pool.blocks[1].any()


@pytest.mark.parametrize("contiguous_bytes", [0, 1 << 26])
@pytest.mark.parametrize("sizes", [(WHOLE,), (1, 30, 20, 24), (16, 59)])
def test_chunked_and_cached_equal_generate(
    model: LoadedModel,
    truth: tuple[list[int], list[float]],
    sizes: tuple[int, ...],
    contiguous_bytes: int,
) -> None:
    """Tokens equal those of `generate` for KV read from the pool and from a buffer. A second
    sequence reads the blocks of the first."""
    driver = Driver(model, contiguous_bytes=contiguous_bytes)
    first = driver.add(prompt(WHOLE), name="first")
    for size in sizes:
        driver.step((first, size))
    found = driver.add(prompt(WHOLE), name="found", shared=first.slots[:3])

    driver.finish(found, first, count=COUNT)

    assert_same_tokens(first.output, *truth)
    assert_same_tokens(found.output, *truth)


@pytest.mark.slow
def test_lower_tiers_and_preemption_change_no_token(folder: Path, tmp_path: Path) -> None:
    """Blocks from host memory and, after a restart, from files give the tokens of an uncached
    run."""
    prompts = [prompt(100, seed=n) for n in range(4)]
    check_lower_tiers(tmp_path, prompts, model=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_hand_offs_carry_latent_kv(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are the same as without a hand-off."""
    folder = save_family("deepseek_v3", tmp_path, vocab_size=512)
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    with (
        RealPair(link, model=str(folder)) as pair,
        RealPair(link, model=str(folder), prefix_caching=False) as plain,
    ):
        pair.converse(plain, random.Random(link))
        assert pair.decode.stats().handoffs["decode"].done == 9
