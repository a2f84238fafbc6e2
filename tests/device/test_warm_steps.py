"""Steps that are computed before an engine is ready: each kind, within any limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.device.gpu.warm_steps import SAMPLED, WarmLimits, warm_steps
from headwater.device.model import LoadedModel
from headwater.device.runner import TorchRunner

LIMITS = WarmLimits(max_rows=256, max_tokens=8192, max_context=131_072, block_tokens=64)


def test_a_runner_computes_every_step(llama: LoadedModel) -> None:
    """The CPU runner accepts the steps of the GPU runner."""
    runner = TorchRunner(
        llama, num_blocks=16, block_tokens=16, max_num_seqs=8, max_batched_tokens=64
    )
    limits = WarmLimits(max_rows=8, max_tokens=64, max_context=200, block_tokens=16)
    for batch in warm_steps(limits):
        runner.submit(batch)
        assert len(runner.collect().tokens) == len(batch.sampled)
    runner.close()


def test_warm_up_has_every_kind_of_step() -> None:
    """There are whole prompts and chunks, with and without a prefix, beside decodes, and every
    kind of sampling."""
    kinds, params, most = set(), set(), 0
    for batch in warm_steps(LIMITS):
        counts = np.diff(batch.query_start)
        starts = batch.context_lens - counts
        kinds.add(
            (
                bool((counts == 1).any()),
                bool((counts > 1).any()),
                bool((starts[counts > 1] > 0).any()),
                len(batch.sampled) == len(counts),
            )
        )
        params |= {id(each) for each in batch.params}
        most = max(most, len(batch.tokens))

    chunks = {(decodes, True, cached, last) for decodes in (False, True) for cached in (False, True)
              for last in (False, True)}  # fmt: skip
    assert kinds >= (chunks - {(True, True, False, False)}) | {(True, False, False, True)}
    assert {id(each) for each in SAMPLED} <= params
    assert most == LIMITS.max_tokens


@given(
    max_rows=st.integers(1, 300),
    max_tokens=st.integers(1, 5000),
    max_context=st.integers(2, 40_000),
    block_tokens=st.sampled_from([16, 64]),
)
def test_steps_stay_within_the_limits(max_rows, max_tokens, max_context, block_tokens):
    """Warm-up steps stay within any limits, down to one row of one token."""
    limits = WarmLimits(max_rows, max_tokens, max_context, block_tokens)
    for batch in warm_steps(limits):
        assert 1 <= batch.num_rows <= max_rows
        assert len(batch.tokens) == batch.query_start[-1] <= max_tokens
        assert batch.context_lens.max() <= max_context
        assert len(batch.histories) == len(batch.params) == len(batch.sampled)


@pytest.mark.parametrize("changed", ["driver", "source"])
def test_kernels_of_another_driver_or_source_are_kept_apart(changed, monkeypatch, tmp_path):
    """The folder's name changes with everything that compiled code depends on."""
    import torch

    from headwater.device.gpu import kernel_cache

    before = kernel_cache.kernel_key(torch.device("cpu"))
    assert before == kernel_cache.kernel_key(torch.device("cpu"))
    if changed == "driver":
        monkeypatch.setattr(kernel_cache, "_driver", lambda: "another")
    else:
        (tmp_path / "kernel.py").write_text("x = 1\n")
        monkeypatch.setattr(kernel_cache, "_SOURCES", tmp_path)

    assert kernel_cache.kernel_key(torch.device("cpu")) != before


def test_the_number_of_kernel_folders_is_bounded(monkeypatch, tmp_path):
    """The folder in use and the newest others stay; the operator's setting takes precedence."""
    import os

    import torch

    from headwater.device.gpu import kernel_cache

    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for number in range(12):
        monkeypatch.setattr(kernel_cache, "_driver", lambda number=number: str(number))
        os.environ.pop("TRITON_CACHE_DIR", None)
        folder = kernel_cache.use_kernel_cache(torch.device("cpu"))
        assert os.environ["TRITON_CACHE_DIR"] == str(folder)

    assert len(list((tmp_path / "kernels").iterdir())) <= 8
    assert folder.is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert str(kernel_cache.use_kernel_cache(torch.device("cpu"))) == "/elsewhere"
