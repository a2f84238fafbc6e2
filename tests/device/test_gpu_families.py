"""Every served family on a GPU, fused and captured, gives what its own code gives.

In float32 the tokens equal those of `generate`. In bfloat16 the models are wide enough for the
kernels that published models use with one row and with few rows, and log-probabilities are
compared.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.device.families import NOT_FUSED, SERVED
from headwater.device.model import load
from headwater.scheduler.request import SamplingParams
from tests.device.driver import Driver, Running
from tests.device.families import FAMILIES, Reference, assert_same_tokens, prompt, save_family
from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402 - it imports Triton

__all__ = ["pytestmark"]

COUNT = 16

ALLOWED_FALLBACKS = {"longcat_flash"}
"""Families that run in transformers' code, without graphs."""

_WIDER = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 256,
}
"""Sizes for which our kernels compute the products of one row and the gated products of few
rows."""

_MAX_RATIO, _FLOOR = 3.0, 0.01
"""Median error of log-probabilities in bfloat16, compared with that of the model's own code in
bfloat16. The median, because rounding sends a few tokens to other experts."""


def test_only_these_families_fall_back() -> None:
    """Adding a family to the fallbacks is a decision, not a side effect."""
    assert NOT_FUSED == ALLOWED_FALLBACKS


@pytest.mark.parametrize("name", sorted(SERVED))
def test_tokens_equal_the_reference(
    name: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens equal those of `generate`: decoded together, in chunks, after a cached prefix, and
    computed again after a preemption. Decode steps are graphs."""
    reference, model = Reference(family(name)), load(family(name), device="cuda")
    driver = Driver(model, runner_class=CudaRunner, block_tokens=4)
    assert driver.runner.is_fused == (name not in ALLOWED_FALLBACKS)
    long, short = prompt(41, seed=1), prompt(6, seed=2)
    whole, other = driver.add(long, name="whole"), driver.add(short, name="short")
    chunked = driver.add(long, name="chunked")

    driver.step((whole, 41), (chunked, 5))
    cached = driver.add(long, name="cached", shared=whole.slots[:7])
    driver.step((chunked, 20), (whole, 1), (cached, 13), (other, 6))
    driver.step((chunked, 16))
    driver.finish(whole, other, chunked, cached, count=3)
    driver.free(chunked)
    chunked.num_computed = 0  # preempted
    driver.step((chunked, len(chunked.tokens)))
    if driver.runner.is_fused:
        monkeypatch.setattr(driver.runner, "_run_packed", None)
    driver.finish(whole, count=8)
    driver.finish(whole, other, chunked, cached, count=COUNT)

    truth = reference.generate(long, COUNT)
    for sequence in (whole, chunked, cached):
        assert_same_tokens(sequence.output, *truth)
    assert_same_tokens(other.output, *reference.generate(short, COUNT))


@pytest.mark.parametrize("name", sorted(SERVED - ALLOWED_FALLBACKS))
def test_log_probabilities_in_bfloat16(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities after a prompt, of one row and of three rows equal those of the model's
    own code in float32, except for rounding."""
    folder = save_wider_family(name, tmp_path)
    driver = Driver(
        load(folder, device="cuda", dtype="bfloat16"), runner_class=CudaRunner, num_blocks=64
    )
    assert driver.runner.is_fused

    rows = decode_some(driver)

    check_log_probabilities(rows, folder)


def save_wider_family(name: str, folder: Path) -> Path:
    """A model of this family with 256 numbers per token."""
    config = FAMILIES[name]()
    changed = {key: size for key, size in _WIDER.items() if hasattr(config, key)}
    if not hasattr(config, "kv_lora_rank") and getattr(config, "head_dim", None) is not None:
        changed["head_dim"] = 64
    return save_family(name, folder, **changed)


def decode_some(driver: Driver) -> list[Running]:
    """Three sequences: the first is decoded alone, then all of them together."""
    params = SamplingParams(temperature=0.0, logprobs=5)
    rows = [
        driver.add(prompt(30 + 7 * seed, seed=seed), name=str(seed), params=params)
        for seed in range(3)
    ]
    driver.finish(rows[0], count=6)
    driver.finish(*rows, count=12)
    return rows


def check_log_probabilities(rows: list[Running], folder: Path) -> None:
    """Compare the five best of each token with the model's own code in float32, whose weights
    are rounded to bfloat16."""
    model: Any = Reference(folder)._model.bfloat16()
    rounded = [log_probabilities(model, row) for row in rows]
    exact = [log_probabilities(model.float(), row) for row in rows]
    ours: list[float] = []
    theirs: list[float] = []
    for row, in_half, in_full in zip(rows, rounded, exact, strict=True):
        for found, half, full in zip(row.results, in_half, in_full, strict=True):
            best = list(found.top_ids)
            ours.append(float((torch.tensor(found.top_values) - full[best]).abs().max()))
            theirs.append(float((half - full)[best].abs().max()))
    allowed = _MAX_RATIO * median(theirs) + _FLOOR
    assert median(ours) < allowed, f"{median(ours):.3f} is more than {allowed:.3f}"


def log_probabilities(model: Any, row: Running) -> Tensor:
    """Log-probabilities of all tokens, by the model's own code, at each position that `row` has
    sampled."""
    with torch.inference_mode():
        logits = model(torch.tensor(row.tokens)[None]).logits[0]
    found: Tensor = logits.float().log_softmax(-1)[row.num_prompt - 1 : -1]
    return found
