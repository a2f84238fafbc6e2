"""Imported by every GPU test: skips it without a GPU, and names the device.

Without a GPU, tests of attention and row kernels can run in Triton's interpreter on a CPU
(`TRITON_INTERPRET=1` and an installed Triton; scripts/nightly does it). The interpreter
computes the same numbers, thousands of times slower, and finds no races.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

WHY = "needs an NVIDIA GPU, and torch finds none here"
HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = not HAS_GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The 16-bit type of kernel tests: the interpreter's products of bfloat16 are wrong."""

pytestmark = [pytest.mark.gpu]
if IS_INTERPRETED:  # numpy warns where a GPU computes an infinity, as the kernels expect
    pytestmark.append(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
"""For `from tests.device.gpu import pytestmark`."""


def require_gpu() -> None:
    """Skip the importing module unless there is a GPU; Triton is imported only with one."""
    if not HAS_GPU:
        pytest.skip(WHY, allow_module_level=True)


def require_kernels() -> None:
    """Skip the importing module unless there is a GPU or Triton's interpreter, which is enough
    for a module that calls single kernels."""
    if not IS_INTERPRETED:
        require_gpu()
        return
    pytest.importorskip("triton", reason="Triton's interpreter needs Triton")
    # An older GPU, so that no kernel is chosen that the interpreter does not have.
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=4)
    cuda.synchronize = lambda device=None: None
