"""Attention of whole prompts over expanded latents."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.device.model import load
from headwater.scheduler.request import SamplingParams
from tests.device.driver import Driver
from tests.device.families import save_family
from tests.device.gpu import DEVICE, pytestmark, require_gpu

require_gpu()

from headwater.device.gpu import decoder as decoder_module  # noqa: E402 - it imports Triton
from headwater.device.gpu.kernel_cache import CompilationCounter  # noqa: E402
from headwater.device.gpu.latent import LatentWeights  # noqa: E402
from headwater.device.gpu.latent_prompt import MIN_EXPANDED_TOKENS, attend_prompt  # noqa: E402
from headwater.device.gpu.mlp import RmsNorm  # noqa: E402
from headwater.device.gpu.runner import CudaRunner  # noqa: E402
from headwater.device.kernels.rotary import RotaryPairs  # noqa: E402

__all__ = ["pytestmark"]

HALF = torch.bfloat16


@pytest.mark.parametrize("heads", [4, 40])
def test_a_prompt_attends_to_expanded_keys_and_values(heads: int) -> None:
    """The result is that of attention in float64 over keys and values expanded from latents, and
    a prompt after other rows needs no other kernels."""
    plain, rotated, rank, value_dim, tokens = 32, 16, 64, 24, 333
    keys = torch.randn(heads, plain, rank, device=DEVICE, dtype=HALF) * 0.2
    values = torch.randn(heads, value_dim, rank, device=DEVICE, dtype=HALF) * 0.2
    norm = torch.rand(rank, device=DEVICE, dtype=HALF) + 0.5
    weights = LatentWeights(
        query_size=heads * (plain + rotated),
        query_norm=None,
        query=None,
        latent_norm=RmsNorm(norm, 1e-6),
        keys=keys,
        values=values.transpose(1, 2),
        pairs=RotaryPairs.HALVES,
    )
    width = heads * (plain + rotated) + rank + rotated
    packed = torch.randn(tokens, width, device=DEVICE, dtype=HALF)
    angles = torch.randn(tokens, rotated // 2, device=DEVICE)
    table = angles.cos(), angles.sin()

    out = attend_prompt(weights, packed.clone(), table, 0.2)
    counter = CompilationCounter()
    counter.install()
    counter.mark_ready()
    after_others = torch.cat((packed[:5], packed))[5:]
    again = attend_prompt(weights, after_others, table, 0.2)
    # Behind other rows of a batch the same kernels are used, so nothing is compiled when a
    # request comes.
    assert counter.num_after_ready == 0
    torch.testing.assert_close(again, out)

    def turn(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        cosine, sine = (part.double()[:, None] for part in table)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

    query, latent, key = packed.double().split((weights.query_size, rank, rotated), dim=1)
    query = query.view(tokens, heads, -1)
    query = torch.cat((query[..., :plain], turn(query[..., plain:])), dim=-1)
    latent = torch.rms_norm(latent, [rank], norm.double(), 1e-6)
    key = turn(key[:, None]).expand(-1, heads, -1)
    key = torch.cat((torch.einsum("nr,hpr->nhp", latent, keys.double()), key), dim=-1)
    value = torch.einsum("nr,hvr->nhv", latent, values.double())
    scores = torch.einsum("thd,nhd->htn", query, key) * 0.2
    hidden = torch.ones(tokens, tokens, device=DEVICE, dtype=torch.bool).triu(1)
    exact = torch.einsum("htn,nhd->thd", scores.masked_fill(hidden, -1e30).softmax(-1), value)
    exact = exact.reshape(tokens, -1)
    assert float((out.double() - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_whole_prompt_equals_one_in_chunks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decoding sequence, a prompt is expanded if it is computed at once, and is not if
    it is computed in chunks. Both give the same log-probabilities, also for the next token."""
    folder = save_family(name, tmp_path, max_position_embeddings=4096)
    model = load(folder, device="cuda", dtype="bfloat16")
    tokens = torch.randint(1, 128, (MIN_EXPANDED_TOKENS + 77,)).int().numpy()
    expanded: list[int] = []

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        expanded[-1] += 1
        return attend_prompt(*given, **named)

    monkeypatch.setattr(decoder_module, "attend_prompt", counted)
    found = []
    for sizes in ((len(tokens),), (1100, 1025)):
        driver = Driver(model, runner_class=CudaRunner, num_blocks=40, block_tokens=64)
        other = driver.add(tokens[:9], name="other")
        driver.step((other, 9))
        expanded.append(0)
        row = driver.add(tokens, params=SamplingParams(temperature=0.0, logprobs=5), name="row")
        for size in sizes:
            driver.step((other, 1), (row, size))
        driver.step((row, 1))
        found.append(row.results)

    assert [count > 0 for count in expanded] == [True, False]
    for whole, chunked in zip(found[0][-2:], found[1][-2:], strict=True):
        assert set(whole.top_ids) & set(chunked.top_ids)
        assert abs(whole.top_values[0] - chunked.top_values[0]) < 0.2
