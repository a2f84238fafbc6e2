"""Imported by every GPU test: skips it without a GPU."""

import pytest
import torch

WHY = "needs an NVIDIA GPU, and torch finds none here"
HAS_GPU = torch.cuda.is_available()

pytestmark = pytest.mark.gpu
"""For `from tests.device.gpu import pytestmark`."""


def require_gpu() -> None:
    """Skip the importing module unless there is a GPU; Triton is imported only with one."""
    if not HAS_GPU:
        pytest.skip(WHY, allow_module_level=True)
