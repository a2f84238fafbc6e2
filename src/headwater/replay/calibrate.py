"""Replaces figures of a machine by those of a benchmark result.

These values are taken from the JSON object that each benchmark prints with `--json`:

    bench serve   rows[].itl_p50_ms by .concurrency     launch + weights, row
    bench tiers   recompute_ttft_ms by length           token, pair
                  hit_ttft_ms.host by length            host_to_device
                  backend_mb_s.file.read and .write     storage_to_host, host_to_storage
    bench gpu     decode.BATCH.step_ms                  launch + weights, row
                  ceilings.memory_gb_s                  KV token read
                  prefill.LENGTH.tokens_s               token, pair
                  copies.LINK.gb_s and .p50_ratio       host_to_device, device_to_host

Values that a file does not have stay unchanged. A file without any of them is an error.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import ConfigError
from headwater.replay.cost import OWN_LINKS, LinkCost, Machine, StepCost

_CONTEXT = 1024
"""Context length, in tokens, of a row in the decode benchmarks."""

Points = dict[int, float]
"""Seconds by number of rows or tokens."""


def calibrated(machine: Machine, path: Path) -> Machine:
    """`machine` with the figures of the result file `path`; others stay unchanged."""
    result = _read(path)
    step, taken = machine.step, list[str]()
    try:
        decode = _decode_points(result)
        if decode:
            step = _with_decode(step, decode, _context_token_s(result, machine))
            taken.append("decoding")
        prefill = _prefill_points(result)
        if prefill:
            step = _with_prefill(step, prefill)
            taken.append("prompts")
        links = dict(machine.links)
        for name, bytes_s in _bandwidths(result, machine.kv_token_bytes).items():
            links[name] = _with_bandwidth(links.get(name), bytes_s, _step_share(result, name))
            taken.append(name)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ConfigError(
            f"--calibrate {path}: a figure is missing or has the wrong type: {exc!r}"
        ) from exc
    if not taken:
        raise ConfigError(
            f"--calibrate {path} has no figures for the cost model; it takes the JSON of "
            "headwater bench serve, tiers or gpu"
        )
    return replace(
        machine,
        name=f"{machine.name}*",
        step=step,
        links=links,
        note=f"{path.name}: {', '.join(taken)}; the rest: {machine.note}",
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read --calibrate {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"--calibrate {path} is not JSON: {exc}") from exc
    if not isinstance(result, dict):
        raise ConfigError(f"--calibrate {path} must be one JSON object")
    return result


def _decode_points(result: Mapping[str, Any]) -> Points:
    """Seconds of a decode step, by rows."""
    if "decode" in result:
        measured = result["decode"].items()
        return {int(rows): at["step_ms"] / 1e3 for rows, at in measured if rows.isdigit()}
    rows = [row for row in result.get("rows", ()) if row.get("engine") == "headwater"]
    if not rows:
        return {}
    model = rows[-1]["model"]  # with several models, the last one counts
    times: dict[int, list[float]] = {}
    for row in rows:
        if row["model"] == model and row["cache"]:
            times.setdefault(row["concurrency"], []).append(row["itl_p50_ms"] / 1e3)
    return {rows: float(np.median(seconds)) for rows, seconds in times.items()}


def _prefill_points(result: Mapping[str, Any]) -> Points:
    """Seconds of a whole prompt, by tokens."""
    if "prefill" in result:
        measured = result["prefill"].items()
        return {int(n): int(n) / at["tokens_s"] for n, at in measured if n.isdigit()}
    return {int(n): ms / 1e3 for n, ms in result.get("recompute_ttft_ms", {}).items()}


def _bandwidths(result: Mapping[str, Any], kv_token_bytes: int) -> dict[str, float]:
    found = {}
    for name in OWN_LINKS:
        if name in result.get("copies", {}):
            found[name] = result["copies"][name]["gb_s"] * 1e9
    hits = {int(n): ms / 1e3 for n, ms in result.get("hit_ttft_ms", {}).get("host", {}).items()}
    if len(hits) > 1:
        _, token_s = _line(hits)
        if token_s > 0:
            found["host_to_device"] = kv_token_bytes / token_s
    speeds = result.get("backend_mb_s", {}).get("file", {})
    for way, name in (("read", "storage_to_host"), ("write", "host_to_storage")):
        if way in speeds:
            found[name] = speeds[way] * 1e6
    return found


def _step_share(result: Mapping[str, Any], link: str) -> float | None:
    """By how much copies lengthen steps, if that was measured."""
    measured = result.get("copies", {}).get(link)
    return None if measured is None else max(measured["p50_ratio"] - 1.0, 0.0)


def _context_token_s(result: Mapping[str, Any], machine: Machine) -> float:
    """Seconds to read the KV of one token, from the speed of the device memory if it is
    known."""
    memory_gb_s = result.get("ceilings", {}).get("memory_gb_s")
    if memory_gb_s is None:
        return machine.step.context_token_s
    return float(machine.kv_token_bytes / (memory_gb_s * 1e9))


def _with_decode(step: StepCost, points: Points, context_token_s: float) -> StepCost:
    """`step` with the costs of decodes: a line is fitted to `points`, the seconds of a step of n
    rows. The time to read contexts of 1 k is subtracted from its slope."""
    start_s, row_s = _line(points)
    launch_s = min(step.launch_s, start_s)
    return replace(
        step,
        launch_s=launch_s,
        weights_s=start_s - launch_s,
        row_s=max(row_s - _CONTEXT * context_token_s, 0.0),
        context_token_s=context_token_s,
        experts_s=0.0,  # a line through whole steps cannot separate the experts
    )


def _with_prefill(step: StepCost, points: Points) -> StepCost:
    """`step` with the costs of prompts: launch + token × n + pair × n (n + 1) / 2 is fitted to
    `points`, the seconds of a prompt of n tokens."""
    lengths = np.array(sorted(points), dtype=np.float64)
    seconds = np.array([points[int(n)] for n in lengths]) - step.launch_s
    pairs = lengths * (lengths + 1) / 2
    if len(lengths) > 1:
        # Fit relative errors; otherwise only the longest prompt would count.
        terms = np.stack((lengths, pairs), axis=1) / seconds[:, None]
        token_s, pair_s = np.linalg.lstsq(terms, np.ones(len(lengths)), rcond=None)[0].tolist()
        if token_s >= 0 and pair_s >= 0:
            return replace(step, token_s=token_s, pair_s=pair_s)
    token_s = float(np.median(seconds / lengths))
    return replace(step, token_s=max(token_s, 0.0), pair_s=0.0)


def _with_bandwidth(
    link: LinkCost | None, bytes_s: float, step_share: float | None
) -> LinkCost:
    link = link or LinkCost(bytes_s=bytes_s)
    share = link.step_share if step_share is None else step_share
    return replace(link, bytes_s=bytes_s, step_share=share)


def _line(points: Points) -> tuple[float, float]:
    """Intercept and slope of the line through `points`, neither below 0."""
    if len(points) == 1:
        return next(iter(points.values())), 0.0
    slope, start = np.polyfit(list(points), list(points.values()), 1).tolist()
    if start <= 0 or slope < 0:
        return min(points.values()), max(slope, 0.0)
    return start, slope
