"""Storage that accepts a quarter of what is computed: does the order of writes matter?

For each of the policies `lru` and `session`, a trace is replayed at least three times. The first
replay measures how much is computed per second. In the others, storage accepts a quarter of that:
first come, first served, or by expected reuse.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from headwater.replay.hints import with_hints
from headwater.replay.presets import preset
from headwater.replay.report import make_report
from headwater.replay.settings import SimConfig
from headwater.replay.simulator import Simulator
from headwater.replay.trace import TraceRequest
from headwater.replay.workload import TraceLoad

_SPEED = 0.4
"""At this speed one simulated H200 keeps up with the conversation trace."""

_SHARE = 0.25
_EVICTIONS = ("lru", "session")
_DEVICE_GIB, _HOST_GIB, _STORAGE_GIB = 50.0, 150.0, 16_000.0

StorageOrder = Literal["reuse", "arrival"]


def measure_storage_order(
    trace: Path, *, limit: int, hints: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """`storage_order_gain`: prompt tokens found in storage with writes ordered by reuse,
    divided by those with first come, first served, for each eviction policy."""
    load = TraceLoad(trace=trace, limit=limit, speed=_SPEED, scale=1.0, seed=1)
    plain = load.requests()
    hinted = None if hints == "none" else with_hints(plain, hints)
    gains, results = {}, {}
    for eviction in _EVICTIONS:
        result = _measure(eviction, plain, hinted, say)
        gains[eviction] = result.pop("gain")
        results[eviction] = result
    return {"storage_order_gain": gains, "storage_order": results}


def _measure(
    eviction: str,
    plain: list[TraceRequest],
    hinted: list[TraceRequest] | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    demand = _replay(plain, eviction, None, "arrival")
    computed = demand["tokens_by_source"]["computed"]
    machine = preset("h200-8b")
    bytes_s = _SHARE * computed * machine.kv_token_bytes / demand["duration_s"]
    say(f"storage-order: {eviction}, writes limited to {bytes_s / 1e9:.2f} GB/s")
    runs = {
        "arrival": _replay(plain, eviction, bytes_s, "arrival"),
        "reuse": _replay(plain, eviction, bytes_s, "reuse"),
    }
    if hinted is not None:
        runs["reuse_with_hints"] = _replay(hinted, eviction, bytes_s, "reuse")
    found = {name: run["tokens_by_source"]["storage"] for name, run in runs.items()}
    return {
        "gain": {name: count / found["arrival"] for name, count in found.items()},
        "write_bytes_s": bytes_s,
        "found_in_storage": {
            name: found[name] / run["prompt_tokens"] for name, run in runs.items()
        },
        "found": {name: run["token_hit"] for name, run in runs.items()},
    }


def _replay(
    requests: list[TraceRequest], eviction: str, bytes_s: float | None, order: StorageOrder
) -> dict[str, Any]:
    machine = preset("h200-8b")
    if bytes_s is not None:
        link = replace(machine.links["host_to_storage"], bytes_s=bytes_s)
        machine = replace(machine, links={**machine.links, "host_to_storage": link})
    config = SimConfig(
        machine=machine,
        device_gib=_DEVICE_GIB,
        host_gib=_HOST_GIB,
        storage_gib=_STORAGE_GIB,
        eviction=eviction,
        load_policy="wait",
        storage_order=order,
    )
    return make_report(Simulator(config, requests).run())
