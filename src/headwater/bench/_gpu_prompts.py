"""Prompts: how fast they are computed, and how soon the first token comes from each tier."""

from pathlib import Path
from statistics import median
from typing import Any

from headwater.bench import _gpu_peers as peers
from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.device.model import LoadedModel

LENGTHS = (2048, 8192, 32768)
LONG = 32768


def measure_prefill(
    model: LoadedModel, engine: GpuEngine, lengths: tuple[int, ...] = LENGTHS
) -> dict[str, Any]:
    """Prompt tokens per second until the first token, of Headwater and of transformers."""
    found = {}
    for length in lengths:
        ours = [_first_s(engine, length, seed=length + number) for number in range(4)][1:]
        theirs = peers.prefill_s(model, length)
        found[str(length)] = {
            "tokens_s": length / median(ours),
            "transformers_tokens_s": length / theirs,
            "ratio": theirs / median(ours),
        }
    return found


def measure_first_token(
    model: LoadedModel, folder: Path, ceiling_gb_s: float, transformers_s: float
) -> dict[str, Any]:
    """Measure the first token of a prompt of 32 k tokens: computed, and found on the device, on
    the host and in a file."""
    blocks = LONG // BLOCK_TOKENS
    engine = GpuEngine(
        model,
        num_blocks=2 * blocks + 64,
        host_blocks=2 * blocks + 64,
        storage=folder,
        max_num_seqs=8,
        max_batched_tokens=LONG,
        write_policy="write_through",
        load_policy="wait",
    )
    engine.runner.warm()
    engine.await_pinned()
    prompt = engine.prompt(LONG, seed=1)
    result: dict[str, Any] = {"transformers_ms": transformers_s * 1e3}
    _first_s(engine, LONG, seed=2)  # every kernel is compiled
    engine.drain()
    engine.cache.reset()
    result["recomputed_ms"] = engine.serve([prompt], max_tokens=1).first_s[0] * 1e3
    engine.drain()
    for name in ("device", "host"):
        taken = []
        for _ in range(3):
            if name == "host":
                engine.clear_device()
            served = engine.serve([prompt], max_tokens=1)
            assert served.found[name] >= LONG - BLOCK_TOKENS, (
                f"the prompt was not found in {name}: {served.found}"
            )
            taken.append(served.first_s[0] * 1e3)
        result[f"{name}_ms"] = median(taken)
    engine.drain()
    engine.clear_device()
    engine.clear_host()
    served = engine.serve([prompt], max_tokens=1)
    result["file_ms"] = served.first_s[0] * 1e3
    result["file_found_tokens"] = served.found["storage"]
    moved = (LONG // BLOCK_TOKENS - 1) * engine.block_bytes
    result["ceiling_ms"] = moved / ceiling_gb_s / 1e6
    result["host_over_ceiling"] = result["host_ms"] / result["ceiling_ms"]
    result["transformers_over_host"] = result["transformers_ms"] / result["host_ms"]
    engine.close()
    return result


def _first_s(engine: GpuEngine, length: int, *, seed: int) -> float:
    return engine.serve([engine.prompt(length, seed)], max_tokens=1).first_s[0]
