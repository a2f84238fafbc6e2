"""Doubles of the engines for which plug-ins are made, if they are not installed."""

import pytest
import torch

from tests.plugins.doubles import dynamo_double, sglang_double, vllm_double
from tests.plugins.doubles.finder import install_double, is_real

install_double("vllm", "vllm", "0.32.0", vllm_double)
install_double("sglang", "sglang", "0.5.23", sglang_double)
install_double("dynamo", "ai-dynamo", "1.6.1", dynamo_double)

# SGLang imports torchvision, whose compiled operators need another build of torch. Two of these
# operators must at least have a signature. The library object keeps the signatures defined.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if is_real("sglang"):
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model folder with an identity of its own, and an empty cache folder."""
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder
