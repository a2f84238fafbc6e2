"""How soon an engine with a large host tier serves, and when the tier is pinned."""

from typing import Any

import numpy as np

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.clock import SystemClock
from headwater.device.model import LoadedModel

_OUTPUT = 64


def measure_start(model: LoadedModel, *, slab_gib: int) -> dict[str, Any]:
    """Times with a loaded model and a new slab: to the first token, until the first prompt's
    blocks are on the host, and until the last page is pinned; and steps meanwhile."""
    clock = SystemClock()
    block_bytes = model.layout(BLOCK_TOKENS).block_bytes
    began_s = clock.now()
    engine = GpuEngine(
        model,
        num_blocks=256,
        host_blocks=(slab_gib << 30) // block_bytes,
        max_num_seqs=8,
        max_batched_tokens=2048,
    )
    assert engine.copier is not None, "there is a host tier"
    ready_s = clock.now()
    served = engine.serve([engine.prompt(2048, seed=3)], max_tokens=_OUTPUT)
    share = engine.copier.pinned_share
    engine.drain()
    saved_s = clock.now()
    engine.await_pinned()
    pinned_s = clock.now()
    engine.close()
    return {
        "slab_gib": slab_gib,
        "ready_s": ready_s - began_s,
        "first_token_s": ready_s - began_s + served.first_s[0],
        "answer_s": ready_s - began_s + served.seconds,
        "pinned_then": share,
        "step_p50_ms": float(np.median(served.steps_s)) * 1e3,
        "first_blocks_saved_s": saved_s - began_s,
        "pinned_s": pinned_s - began_s,
    }
