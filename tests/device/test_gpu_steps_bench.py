"""Contexts that `headwater bench gpu` measures step by step fit the positions of the model."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.device.gpu import require_kernels

require_kernels()

from headwater.bench import _gpu_fp8kv, _gpu_steps  # noqa: E402 - Triton below
from headwater.bench._gpu_shapes import SHAPES  # noqa: E402


def test_a_context_beyond_the_positions_of_the_model_is_refused() -> None:
    """A row that would grow behind the rotary tables is refused before anything runs; on a GPU
    the kernels would read other memory, or end with an illegal memory access."""
    runner: Any = SimpleNamespace(_model=SimpleNamespace(max_model_len=4096))
    with pytest.raises(ValueError, match=r"row of 4\d+ tokens .* model's 4096"):
        _gpu_steps.decode_ms(runner, 1, 4096)
    for measure in (
        lambda: _gpu_steps.prefill_ms(runner, 4097),
        lambda: _gpu_steps.all_logits(runner, [0] * 4097),
    ):
        with pytest.raises(ValueError, match="row of 4097 tokens"):
            measure()
    _gpu_steps.check_positions(runner, 4096)


@pytest.mark.parametrize("shape", ["8b", "deepseek-v2-lite", "deepseek-v2-lite-9"])
def test_shapes_have_the_positions_that_are_measured(shape: str) -> None:
    """The longest context of the parts `fp8kv` and `fp8mla`, with its decoded tokens, fits."""
    runner: Any = SimpleNamespace(
        _model=SimpleNamespace(max_model_len=SHAPES[shape]().max_position_embeddings)
    )
    _gpu_steps.check_positions(runner, _gpu_fp8kv._LONG + _gpu_steps._STEPS - 1)
