"""The limits of the machine: memory bandwidth, copies, and one matrix product."""

from statistics import median
from typing import Any

import torch

from headwater.bench._gpu_engine import DEVICE

_GIB = 1 << 30


def time_ms(call: Any, repeats: int = 5) -> float:  # noqa: ANN401 -- any callable
    """Median time of `call` on the device, measured with CUDA events."""
    call()
    taken = []
    for _ in range(repeats):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        taken.append(float(begun.elapsed_time(ended)))
    return median(taken)


def measure() -> dict[str, float]:
    """Rates of the device: bytes read and written per second, pinned copies, and bfloat16
    products."""
    found = {**_memory(), **_products()}
    torch.cuda.empty_cache()
    return found


def _memory() -> dict[str, float]:
    source = torch.randn(_GIB, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    memory_ms = time_ms(lambda: target.copy_(source), 9)
    host = torch.empty(2 * _GIB, dtype=torch.uint8, pin_memory=True)
    flat = source.view(torch.uint8)
    up_ms = time_ms(lambda: flat.copy_(host, non_blocking=True))
    down_ms = time_ms(lambda: host.copy_(flat, non_blocking=True))
    return {
        "memory_gb_s": 4 * _GIB / memory_ms / 1e6,
        "host_to_device_gb_s": 2 * _GIB / up_ms / 1e6,
        "device_to_host_gb_s": 2 * _GIB / down_ms / 1e6,
    }


def _products() -> dict[str, float]:
    a = torch.randn((8192, 8192), dtype=torch.bfloat16, device=DEVICE)
    product_ms = time_ms(lambda: torch.mm(a, a))
    return {"product_tflop_s": 2 * 8192**3 / product_ms / 1e9}
