"""Kernels that start while the kernel before them ends."""

from pathlib import Path

import pytest
import torch

from headwater.device.model import load
from headwater.scheduler.request import SamplingParams
from tests.device.driver import Driver
from tests.device.families import prompt, save_family
from tests.device.gpu import DEVICE, pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.runner import CudaRunner  # noqa: E402 - it imports Triton
from headwater.device.kernels import early  # noqa: E402

__all__ = ["pytestmark"]


def test_few_rows_start_early_and_a_product_of_a_wide_one_does_not() -> None:
    """One row of a large model is slower if its products start early; this was measured. Short
    kernels start early after them."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("for Hopper and later")
    for rows, size, expected in (
        (1, 2048, True),
        (1, 4096, False),
        (64, 8192, True),
        (65, 8, False),
    ):
        x = torch.empty(rows, size, device=DEVICE)
        assert early.starts_early(x) is expected
        assert early.starts_early(x, is_short=True) is early.lets_next_start(x) is (rows <= 64)


@pytest.mark.parametrize(("num_rows", "hidden_size"), [(1, 512), (6, 512), (1, 4096)])
def test_log_probabilities_do_not_depend_on_the_start(
    num_rows: int, hidden_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps have the same log-probabilities, except for rounding, whether their
    kernels start early or not."""
    folder = save_family(
        "llama", tmp_path, hidden_size=hidden_size, intermediate_size=1024, head_dim=64
    )
    model = load(folder, device="cuda", dtype="bfloat16")
    params = SamplingParams(temperature=0.0, logprobs=5)
    found = []
    for max_rows in (0, 64):
        monkeypatch.setattr(early, "MAX_EARLY_ROWS", max_rows)
        driver = Driver(model, runner_class=CudaRunner, block_tokens=64, num_blocks=16)
        rows = [
            driver.add(prompt(20 + n, seed=n), params=params, name=str(n))
            for n in range(num_rows)
        ]
        driver.finish(*rows, count=4)
        found.append([row.results[1].top_values[0] for row in rows])

    assert found[0] == pytest.approx(found[1], abs=0.1)
