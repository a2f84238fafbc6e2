"""Models split over ranks give, token for token, the output of one rank."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from headwater.device.model import load
from headwater.device.parallel.share import RankShare
from headwater.errors import ConfigError, ModelError
from tests.device.driver import Driver
from tests.device.families import FAMILIES, prompt, save_family
from tests.device.ranks import RankHarness, mixed_tokens

REFUSED = {"afmoe", "axk1", "granitemoeshared", "longcat_flash"}
"""A gate after attention; a norm inside the block of experts; an MLP beside it; two attentions in a
layer."""

REPRESENTATIVE = (
    "deepseek_v3",  # latent KV
    "llama",  # fused layers
    "phi3",  # joint projections
    "phi",  # biases, MLP without a gate
    "olmo2",  # norms over all heads
    "gemma2",  # soft-caps, windows, norms after attention
    "qwen2_moe",  # experts and a shared expert
    "gpt_oss",  # experts with biases, sinks
    "glm4_moe",  # dense layers among those with experts
)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankHarness]:
    harness = RankHarness(2)
    yield harness
    harness.close()


def _compare(harness: RankHarness, folder: Path) -> None:
    model = harness.load(folder)
    split = Driver(model, block_tokens=4, runner_class=partial(harness.runner))
    whole = Driver(load(folder), block_tokens=4)

    assert mixed_tokens(split) == mixed_tokens(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_two_ranks_give_the_tokens_of_one(
    name: str, family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """Attention, MLPs, experts, embedding and output layer are split; the tokens are the same."""
    _compare(two_ranks, family(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_layers_that_cannot_be_split_are_refused(
    name: str, family: Callable[[str], Path]
) -> None:
    """Results of such layers, computed in parts, would be wrong."""
    with pytest.raises(ModelError, match="tensor"):
        load(family(name), share=RankShare(rank=0, size=2))


def test_the_page_names_the_families_that_are_refused() -> None:
    """All other families are computed by several ranks in these tests."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    named = re.search(r"Every served family works except ([^;]*?), which\s+are refused", page)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == REFUSED


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(REPRESENTATIVE) - REFUSED))
def test_two_ranks_give_the_tokens_of_one_in_every_family(
    name: str, family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """Two ranks and one rank give equal tokens for every family that is served."""
    _compare(two_ranks, family(name))


@pytest.mark.slow
def test_two_steps_may_be_in_flight(
    family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """A token that a step carries from the previous one reaches every rank."""
    outputs = []
    for model, runner_class in (
        (load(family("llama")), None),
        (two_ranks.load(family("llama")), partial(two_ranks.runner, depth=2)),
    ):
        driver = Driver(model, block_tokens=4, runner_class=runner_class)
        sequence = driver.add(prompt(9, seed=5))
        driver.submit((sequence, 9))
        if runner_class is None:
            driver.collect()
            driver.finish(sequence, count=6)
        else:
            for _ in range(5):
                driver.submit((sequence, 1))
                driver.collect()
            driver.collect()
        outputs.append(sequence.output)

    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_a_vocabulary_that_cannot_be_split_evenly_is_still_split(
    tmp_path: Path, two_ranks: RankHarness
) -> None:
    """The parts of the embedding and of the output layer differ by one token, and the parts of
    an MLP by one row."""
    _compare(two_ranks, save_family("llama", tmp_path, vocab_size=127, intermediate_size=95))


@pytest.mark.slow
def test_parts_of_blocks_make_whole_blocks_on_the_host(
    family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """A whole block has the bytes of a single rank, and is copied back to every rank."""
    folder = family("llama")
    split = Driver(
        two_ranks.load(folder), block_tokens=4, runner_class=partial(two_ranks.runner)
    )
    whole = Driver(load(folder), block_tokens=4)
    mixed_tokens(split)
    mixed_tokens(whole)
    pool = whole.runner.pool

    offloaded = two_ranks.copy_out(pool.num_blocks)
    two_ranks.clear()
    two_ranks.copy_in(pool.num_blocks)

    written = (pool.blocks != 0).any(dim=1)
    ours, theirs = (blocks[written].view(torch.float32) for blocks in (offloaded, pool.blocks))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.equal(two_ranks.copy_out(pool.num_blocks), offloaded)


def test_heads_that_cannot_be_split_are_refused() -> None:
    """The message names the size and the heads."""
    with pytest.raises(ConfigError, match="3 does not divide the model's 8 attention heads"):
        RankShare(rank=0, size=3).heads(8)
    with pytest.raises(ConfigError, match="6 KV heads"):
        RankShare(rank=0, size=4).kv_heads(6)


def test_parts_cover_everything_once() -> None:
    """The ranks together have everything once, for any sizes."""
    for total in (7, 8, 127):
        for size in (1, 2, 3, 8):
            parts = [RankShare(rank=rank, size=size).part(total) for rank in range(size)]
            assert [i for start, end in parts for i in range(start, end)] == list(range(total))


def test_one_of_the_ranks_with_a_kv_head_writes_it() -> None:
    """Every KV head is written to lower tiers by exactly one rank."""
    for kv_heads, size in ((8, 2), (2, 4), (1, 8), (4, 4)):
        shares = [RankShare(rank=rank, size=size) for rank in range(size)]
        written = [share.kv_heads(kv_heads) for share in shares if share.writes_kv(kv_heads)]
        assert [i for start, end in written for i in range(start, end)] == list(range(kv_heads))
