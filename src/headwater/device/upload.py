"""Copies small arrays to the device and back without waiting for it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def put(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """`values` on `device`; on a GPU in stream order, without waiting."""
    whole = torch.from_numpy(values)
    if device.type == "cpu":
        return whole
    return whole.pin_memory().to(device, non_blocking=True)


def fetch(values: Tensor) -> Tensor:
    """`values` in main memory. From a GPU they arrive when its current work is done."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
