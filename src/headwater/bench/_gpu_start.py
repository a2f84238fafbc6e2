"""How soon an engine with a large host tier serves, and when all of that is pinned."""

from typing import Any

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.clock import SystemClock
from headwater.device.model import LoadedModel

_POLL_S = 0.02


def measure_start(model: LoadedModel, *, slab_gib: int) -> dict[str, Any]:
    """A model that is loaded, a slab that is not yet there: until the first token, until the
    first prompt's blocks are on the host, until the last page is pinned."""
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
    engine.serve([engine.prompt(2048, seed=3)], max_tokens=1)
    served_s, share = clock.now(), engine.copier.pinned_share
    engine.drain()
    saved_s = clock.now()
    while engine.copier.pinned_share < 1.0:
        engine.core.completions.wait(_POLL_S)
    pinned_s = clock.now()
    engine.close()
    return {
        "slab_gib": slab_gib,
        "ready_s": ready_s - began_s,
        "first_token_s": served_s - began_s,
        "pinned_then": share,
        "first_blocks_saved_s": saved_s - began_s,
        "pinned_s": pinned_s - began_s,
    }
