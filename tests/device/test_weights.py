"""A loaded model and the files that it came from."""

import shutil
from pathlib import Path

import torch

from headwater.device.builtin import LlamaShape, make_llama
from headwater.device.model import load


def test_a_file_that_is_written_anew_does_not_change_a_model_that_runs(tmp_path):
    """Weights are not mapped: a rewritten file neither changes them nor ends the process by
    SIGBUS."""
    make_llama(tmp_path / "a", LlamaShape(), seed=1)
    make_llama(tmp_path / "b", LlamaShape(), seed=2)
    model = load(tmp_path / "a")
    before = {name: weight.clone() for name, weight in model.module.named_parameters()}

    name = "model.safetensors"
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)

    for key, weight in model.module.named_parameters():
        assert torch.equal(weight, before[key]), key
    assert str(tmp_path / "a") not in Path("/proc/self/maps").read_text()
