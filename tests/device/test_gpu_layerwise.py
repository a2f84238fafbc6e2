"""A chunk that overlaps its load reads only layers that have arrived completely."""

from typing import Any

import pytest
import torch

from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from transformers import LlamaConfig  # noqa: E402

from headwater.bench._gpu_engine import GpuEngine, random_model  # noqa: E402 - it imports Triton
from headwater.device.gpu.arrivals import Arrival  # noqa: E402
from headwater.device.model import LoadedModel  # noqa: E402

__all__ = ["pytestmark"]

BLOCKS = 96
"""Number of blocks of 4 MiB each: copying them takes some milliseconds, longer than queueing
the step."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    make: Any = LlamaConfig
    config = make(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, vocab_size=2048, max_position_embeddings=16384,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    loaded = random_model(config, torch.float32)
    with torch.no_grad():
        for weight in loaded.module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.6 / weight.shape[-1] ** 0.5)
    return loaded


def serve_again(model: LoadedModel, turns: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of computed prompts, and of the same prompts found on the host; the load targets
    contain stale bytes."""
    engine = GpuEngine(
        model, num_blocks=BLOCKS + 16, host_blocks=BLOCKS * 4, max_num_seqs=4,
        max_batched_tokens=1024, load_policy="wait",
    )  # fmt: skip
    first, again = [], []
    for turn in range(turns):
        prompt = engine.prompt(BLOCKS * 64 - 10, seed=turn)
        first.append(engine.tokens(prompt, max_tokens=8))
        engine.drain()
        engine.clear_device()
        engine.runner.pool.data.normal_()
        # A load waits for no kernel, so this one has to end before the load begins.
        torch.cuda.synchronize()
        again.append(engine.tokens(prompt, max_tokens=8))
        assert engine.last_found["host"] >= (BLOCKS - 2) * 64
    engine.close()
    return first, again


def test_overlapping_a_load_equals_computing(model: LoadedModel) -> None:
    """Lesson 21: every layer is attended after it has arrived; the tokens are the same."""
    first, again = serve_again(model, turns=4)

    assert again == first


def test_without_the_event_dependency_a_step_reads_blocks_that_have_not_arrived(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above detects the dependency: without it, tokens differ."""
    monkeypatch.setattr(Arrival, "order", lambda self, layer, stream: None)

    first, again = serve_again(model, turns=4)

    assert again != first
