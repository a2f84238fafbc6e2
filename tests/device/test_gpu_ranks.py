"""Ranks on GPUs, as far as one GPU can show: NCCL with a single rank, and two ranks that share the
device over gloo."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.driver import Driver
from tests.device.gpu import pytestmark, require_gpu
from tests.device.ranks import mixed_tokens

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402
from headwater.device.model import load  # noqa: E402
from headwater.device.parallel.group import RankGroup  # noqa: E402
from headwater.device.parallel.share import RankShare  # noqa: E402
from tests.device.ranks import RankHarness  # noqa: E402

__all__ = ["pytestmark"]

FAMILIES = ("llama", "qwen3", "qwen3_moe", "olmo2", "gemma2")
"""Families in our own decoder, with dense layers, with experts and with norms after attention,
and families in transformers' code."""


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[RankGroup]:
    device = torch.device("cuda:0")
    group = RankGroup(
        RankShare(rank=0, size=1), backend="nccl", store=tmp_path / "meet", device=device
    )
    yield group
    group.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankHarness]:
    harness = RankHarness(2, device="cuda:0")
    yield harness
    harness.close()


def _alone(folder: Path) -> list[list[int]]:
    model = load(folder, device="cuda:0", dtype="float32")
    return mixed_tokens(Driver(model, block_tokens=16, runner_class=CudaRunner))


@pytest.mark.parametrize("name", FAMILIES)
def test_collectives_in_captured_graphs_change_no_token(
    name: str, family: Callable[[str], Path], one_rank: RankGroup
) -> None:
    """On one rank with NCCL every sum and join is called, also in graphs, and changes
    nothing."""

    def connected(model: Any, **sizes: Any) -> CudaRunner:
        runner = CudaRunner(model, **sizes)
        runner.connect(one_rank)
        runner.capture(8)
        return runner

    share = RankShare(rank=0, size=1)
    model = load(family(name), device="cuda:0", dtype="float32", share=share)

    split = mixed_tokens(Driver(model, block_tokens=16, runner_class=connected))

    assert split == _alone(family(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_on_one_gpu_give_the_tokens_of_one(
    name: str, family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """Tokens are equal over gloo, in float32 and without graphs."""
    model = two_ranks.load(family(name), dtype="float32")

    split = mixed_tokens(Driver(model, block_tokens=16, runner_class=partial(two_ranks.runner)))

    assert split == _alone(family(name))


def test_parts_of_blocks_go_to_the_host_and_back(
    family: Callable[[str], Path], two_ranks: RankHarness
) -> None:
    """Each rank copies its KV heads as columns of whole blocks. Blocks that are copied back and
    out again do not change, and a whole block has the values that an engine of one rank has."""
    folder = family("llama")
    split = Driver(
        two_ranks.load(folder, dtype="float32"),
        block_tokens=16,
        runner_class=partial(two_ranks.runner),
    )
    whole = Driver(
        load(folder, device="cuda:0", dtype="float32"), block_tokens=16, runner_class=CudaRunner
    )
    mixed_tokens(split)
    mixed_tokens(whole)
    blocks = whole.runner.pool.blocks.cpu()

    offloaded = two_ranks.copy_out(whole.runner.pool.num_blocks)
    two_ranks.clear()
    two_ranks.copy_in(whole.runner.pool.num_blocks)
    again = two_ranks.copy_out(whole.runner.pool.num_blocks)

    written = (blocks != 0).any(dim=1)
    numbers = blocks[written].view(torch.float32)
    assert torch.allclose(offloaded[written].view(torch.float32), numbers, atol=1e-4)
    assert torch.equal(offloaded, again)
