"""The sampling kernels choose the tokens of the CPU sampler; this runs in Triton's interpreter,
too.

`test_gpu_sampling.py` compares steps with all parameters on a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.counter_random import uniform_of
from headwater.device.sampler import SampledRows, Sampler
from headwater.scheduler.request import SamplingParams
from tests.device.gpu import DEVICE, pytestmark, require_kernels

require_kernels()

from headwater.device.kernels.greedy import choose_greedy  # noqa: E402 - it imports Triton
from headwater.device.kernels.logit_edits import EDITED, RANDOM, SamplingInputs  # noqa: E402
from headwater.device.kernels.sampling import SamplingScratch, choose_sampled  # noqa: E402

__all__ = ["pytestmark"]

LENGTH = 6


def choose(logits: Tensor, params: list[SamplingParams], *, is_edited: bool = False) -> Tensor:
    """Tokens by the kernels, after the greedy choice of the forward pass."""
    rows, vocab = logits.shape
    chosen = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    choose_greedy(logits.to(DEVICE), chosen)
    seeds = np.array([each.seed for each in params], dtype=np.uint64)
    uniform = uniform_of(seeds, np.full(rows, LENGTH, dtype=np.int64))
    none = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    inputs = SamplingInputs(
        flags=none + (RANDOM | EDITED if is_edited else RANDOM),
        top_k=torch.tensor([each.top_k for each in params], device=DEVICE).int(),
        state=none - 1,
        edit_start=none,
        edit_end=none,
        temperature=floats([each.temperature for each in params]),
        top_p=floats([each.top_p for each in params]),
        min_p=floats([each.min_p for each in params]),
        uniform=torch.from_numpy(np.asarray(uniform, dtype=np.float32)).to(DEVICE),
        repetition=none.float(),
        presence=none.float(),
        frequency=none.float(),
        edit_ids=none,
        edit_amounts=none.float(),
        mask=none - 1,
        masks=torch.zeros((rows, -(-vocab // 32)), dtype=torch.int32, device=DEVICE),
        counts=torch.zeros((1, vocab), dtype=torch.int16, device=DEVICE),
    )
    scratch = SamplingScratch(rows, vocab, torch.device(DEVICE))
    choose_sampled(logits.to(DEVICE), chosen, inputs, scratch, rows)
    return chosen.cpu()


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def reference(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    history = np.zeros(LENGTH, dtype=np.int32)
    rows = SampledRows(
        params=params,
        positions=np.full(len(params), LENGTH),
        prompt_lens=[1] * len(params),
        histories=dict.fromkeys(range(len(params)), (history, 1)),
    )
    return Sampler(()).pick(logits, rows).int()


def random_params(random: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(random.choice([0.3, 1.0, 1.7, 100.0])),
        top_p=float(random.choice([1.0, 0.95, 0.4, 0.9999999])),
        top_k=int(random.choice([0, 0, 1, 7, 50, 300])),
        min_p=float(random.choice([0.0, 0.05, 0.5])),
        seed=int(random.integers(1 << 60)),
    )


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize("scale", [0.3, 4.0, 1e37])
def test_tokens_equal_the_cpu_sampler(
    scale: float,
    is_edited: bool,
) -> None:
    """With flat and with peaked logits, in both types. With the largest scale, the k largest
    logits are far below the largest one, so the search begins a second time."""
    random = np.random.default_rng(int(scale))
    made = torch.randn(8, 1000, generator=torch.Generator().manual_seed(5)) * scale
    for logits in (made, made.bfloat16()):
        params = [random_params(random) for _ in range(8)]

        chosen = choose(logits, params, is_edited=is_edited)

        assert chosen.tolist() == reference(logits, params).tolist()


@pytest.mark.parametrize(("vocab", "top_k"), [(100, 80), (300, 250)])
def test_top_k_far_below_the_largest_logit(vocab: int, top_k: int) -> None:
    """Three logits are much larger than all others, which top-k keeps nevertheless."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    logits[:, :3] += 60.0
    base = SamplingParams(temperature=100.0, top_k=top_k)
    params = [replace(base, seed=seed) for seed in range(4)]

    assert choose(logits, params).tolist() == reference(logits, params).tolist()


@pytest.mark.parametrize("is_edited", [False, True])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, float("nan"), 3.0, 2.0], 2),
        ([1.0, float("inf"), float("-inf"), 2.0], 3),
        ([float("nan")] * 4, 0),
        ([float("-inf")] * 4, 0),
    ],
)
def test_a_broken_row_is_greedy(
    row: list[float],
    expected: int,
    is_edited: bool,
) -> None:
    """The result is the same with top-k, with top-p, with both and with neither."""
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.5), (2, 0.5)):
        params = [SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=3)]

        assert choose(torch.tensor([row]), params, is_edited=is_edited).tolist() == [expected]
