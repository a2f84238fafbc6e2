"""The result of a replay as one value, which is printed, compared and written as JSON.

Every number depends only on the trace, the settings and the seed, so the bytes are the same
each time.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwater.metrics.names import LAST_BLOCK
from headwater.replay.cost import GIB
from headwater.replay.links import SharedLink
from headwater.replay.request import SimRequest
from headwater.replay.settings import SimConfig
from headwater.replay.simulator import SimulationRun
from headwater.replay.slo import Bound, attainment
from headwater.replay.time_series import summed

Seconds: TypeAlias = NDArray[np.float64]
Report: TypeAlias = dict[str, Any]

_LEAST_OVERLOAD = 16
"""With fewer waiting requests there is no overload."""

_TIERS = ("device", "host", "storage")
_SOURCES = (*_TIERS, "peer")
_NUM_BUCKETS = 60
_MAX_POINTS = 480


def make_report(run: SimulationRun, bounds: Sequence[Bound] = ()) -> Report:
    """The whole report of `run`."""
    served = sorted(
        (one for instance in run.instances for one in instance.served),
        key=lambda one: one.arrival_s,
    )
    ended = [one for one in served if one.finished]
    latencies = _latencies(ended)
    duration_s = _duration_s(served)
    output_tokens = sum(one.num_output for one in ended)
    over_time = _over_time(run)
    report = {
        "requests": len(served),
        "refused": len(served) - len(ended),
        **_hits(ended, run.config.block_tokens),
        "ttft_ms": _spread(latencies["ttft"]),
        "itl_ms": _spread(latencies["itl"]),
        "e2e_ms": _spread(latencies["e2e"]),
        "throughput": output_tokens / duration_s,
        "requests_per_s": len(ended) / duration_s,
        "prompt_tokens_per_s": sum(one.prompt_tokens for one in ended) / duration_s,
        "output_tokens": output_tokens,
        "duration_s": duration_s,
        **_engines(run),
        **_links(run, served),
        "queue": _queue(over_time, served),
    }
    if bounds:
        report["slo"] = attainment(bounds, served, latencies, duration_s)
    if len(run.instances) > 1:
        report["by_instance"] = [
            _hits([o for o in i.served if o.finished], run.config.block_tokens)["token_hit"]
            for i in run.instances
        ]
    report["over_time"] = over_time
    report["hits_over_time"] = _hits_over_time(ended)
    report["ttft_ms_quantiles"] = _quantiles(latencies["ttft"])
    report["settings"] = describe(run.config)
    return report


def describe(config: SimConfig) -> Report:
    """The settings of a report."""
    cache = config.cache()
    return {
        "machine": config.machine.name,
        "instances": config.num_instances,
        "prefill_instances": config.num_prefill,
        "router": config.router,
        "block_tokens": config.block_tokens,
        "device_gib": cache.device_blocks * config.block_bytes / GIB,
        "host_gib": cache.host_blocks * config.block_bytes / GIB,
        "storage_gib": config.storage_blocks * config.block_bytes / GIB,
        "eviction": config.eviction,
        "write_policy": config.write_policy,
        "load_policy": config.load_policy,
    }


def size_text(gib: float) -> str:
    """A number of GiB as text: whole, or with three digits if it is small."""
    return f"{gib:,.0f}" if gib >= 10 or not gib else f"{gib:.3g}"


def _hits(ended: Sequence[SimRequest], block_tokens: int) -> Report:
    """Shares of the prompt tokens that were found, in which tier, and the reasons of the
    misses."""
    sources: Counter[str] = Counter(dict.fromkeys(_SOURCES, 0))
    reasons: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for one in ended:
        if one.usage is None:
            continue
        sources.update(one.usage.by_tier)
        if one.usage.miss_reason is not None:
            reasons[one.usage.miss_reason] += 1
        missed[one.usage.miss_reason or LAST_BLOCK] += one.usage.computed
    prompt = sum(one.prompt_tokens for one in ended)
    found = sum(sources.values())
    blocks = sum(one.prompt_tokens // block_tokens for one in ended)
    return {
        "block_hit": found / block_tokens / max(blocks, 1),
        "token_hit": found / max(prompt, 1),
        "token_hit_ceiling": sum(one.reusable_tokens for one in ended) / max(prompt, 1),
        "prompt_tokens": prompt,
        "tokens_by_source": dict(sources) | {"computed": prompt - found},
        "misses_by_reason": dict(sorted(reasons.items())),
        "missed_tokens_by_reason": dict(sorted(missed.items())),
    }


def _latencies(ended: Sequence[SimRequest]) -> dict[str, Seconds]:
    gaps = [np.frombuffer(one.gaps_s) for one in ended if one.gaps_s]
    return {
        "ttft": np.array([one.ttft_s for one in ended]),
        "itl": np.concatenate(gaps) if gaps else np.empty(0),
        "e2e": np.array([one.last_s - one.arrival_s for one in ended]),
    }


def _spread(seconds: Seconds) -> dict[str, float]:
    if not len(seconds):
        return dict.fromkeys(("p50", "p90", "p99", "mean", "max"), 0.0)
    p50, p90, p99 = (1e3 * np.percentile(seconds, (50, 90, 99))).tolist()
    mean, most = 1e3 * float(seconds.mean()), 1e3 * float(seconds.max())
    return {"p50": p50, "p90": p90, "p99": p99, "mean": mean, "max": most}


def _quantiles(seconds: Seconds) -> list[float]:
    """101 quantiles, for a picture of the distribution."""
    if not len(seconds):
        return []
    values: list[float] = (1e3 * np.percentile(seconds, np.arange(101))).tolist()
    return values


def _duration_s(served: Sequence[SimRequest]) -> float:
    """Seconds from the first arrival to the last token."""
    if not served:
        return 1.0
    end_s = max((one.last_s for one in served), default=0.0)
    return max(end_s - served[0].arrival_s, 1e-9)


def _engines(run: SimulationRun) -> Report:
    stats = [instance.core.stats() for instance in run.instances]
    choices: Counter[str] = Counter()
    hints: Counter[str] = Counter()
    for one in stats:
        choices.update(one.load_choices)
        hints.update(one.hints)
    tiers = {
        name: {
            "blocks": sum(one.tiers[name].num_blocks for one in stats),
            "evicted": sum(one.tiers[name].evicted for one in stats),
        }
        for name in ("device", "host")
    }
    if run.store is not None:
        tiers["storage"] = {
            "blocks": run.store.capacity_blocks,
            "evicted": run.store.num_evicted,
        }
    return {
        "preemptions": sum(one.num_preemptions for one in stats),
        "steps": sum(one.num_steps for one in stats),
        "load_choices": dict(sorted(choices.items())),
        "cache_hints": dict(sorted(hints.items())),
        "tiers": tiers,
        **_handoffs(run),
    }


def _handoffs(run: SimulationRun) -> Report:
    """The hand-offs of decode instances, if there are any."""
    controllers = [one.handoffs for one in run.instances if one.handoffs is not None]
    if not controllers:
        return {}
    totals = [handoffs.stats().decode for handoffs in controllers]
    done = sum(one.num_done for one in totals)
    failures: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for one in totals:
        failures.update({str(reason): count for reason, count in one.failures.items()})
        seconds.update(one.seconds)
    return {
        "handoffs": {
            "done": done,
            "failures": dict(sorted(failures.items())),
            "bytes": sum(one.num_bytes for one in totals),
            "mean_ms": {part: 1e3 * sum_s / max(done, 1) for part, sum_s in seconds.items()},
        }
    }


def _links(run: SimulationRun, served: Sequence[SimRequest]) -> Report:
    """Bytes and busy share of each link, over the time until its last copy or the last token."""
    start_s = served[0].arrival_s if served else 0.0
    end_s = max((one.last_s for one in served), default=start_s)
    by_name: dict[str, list[SharedLink]] = {}
    for name, link in run.links:
        by_name.setdefault(name, []).append(link)
    shares = {
        name: [one.busy_s / max(max(end_s, one.busy_until_s) - start_s, 1e-9) for one in links]
        for name, links in by_name.items()
    }
    return {
        "bytes_per_link": {
            name: sum(one.num_bytes for one in links) for name, links in by_name.items()
        },
        "busy_share_per_link": {name: sum(each) / len(each) for name, each in shares.items()},
    }


def _queue(
    over_time: dict[str, list[float]], served: Sequence[SimRequest]
) -> dict[str, float | bool]:
    waiting = over_time["waiting"]
    last_s = served[-1].arrival_s if served else 0.0
    arriving = [
        count for t_s, count in zip(over_time["t_s"], waiting, strict=True) if t_s <= last_s
    ]
    return {
        "mean_waiting": sum(waiting) / max(len(waiting), 1),
        "max_waiting": max(waiting, default=0.0),
        "overloaded": kept_growing(arriving),
    }


def kept_growing(waiting: Sequence[float]) -> bool:
    """Whether a queue kept growing while requests arrived. Then the machines cannot serve this
    traffic, and latencies depend on the length of the trace. A burst that is worked off is not
    an overload."""
    most = max(waiting, default=0.0)
    peak = list(waiting).index(most) + 1 if waiting else 0
    if most < _LEAST_OVERLOAD or peak < max(8, len(waiting) // 2):
        return False
    last = len(waiting) * 19 // 20  # the last samples may be after the last arrival
    if min(waiting[peak:last], default=most) < most / 4:
        return False  # worked off while requests still arrived
    quarters = [waiting[peak * q // 4 : peak * (q + 1) // 4] for q in range(4)]
    means = [sum(quarter) / len(quarter) for quarter in quarters]
    return means[1] > 0 and all(a < b for a, b in pairwise(means))


def _over_time(run: SimulationRun) -> dict[str, list[float]]:
    """Requests, and GiB of each tier in use; for a long run every n-th sample."""
    waiting, running, device, held, host = summed([i.samples for i in run.instances], 5)
    (stored,) = summed([run.stored], 1)
    stored += stored[-1:] * (len(waiting) - len(stored))
    gib = run.config.block_bytes / GIB
    columns = {
        "t_s": [run.times.start_s + at * run.times.every_s for at in range(len(waiting))],
        "waiting": waiting,
        "running": running,
    }
    used = {"device": device, "held": held, "host": host, "storage": stored}
    for name, blocks in used.items():
        columns[f"{name}_gib"] = [value * gib for value in blocks[: len(waiting)]]
    stride = -(-len(waiting) // _MAX_POINTS) or 1
    return {name: values[::stride] for name, values in columns.items()}


def _hits_over_time(ended: Sequence[SimRequest]) -> dict[str, list[float]]:
    """Prompt tokens by source, in equal intervals of the time of first tokens."""
    if not ended:
        return {}
    firsts = np.array([one.first_s for one in ended], dtype=np.float64)
    start_s, end_s = float(firsts.min()), float(firsts.max())
    width_s = max((end_s - start_s) / _NUM_BUCKETS, 1e-9)
    places = np.minimum(((firsts - start_s) / width_s).astype(np.int64), _NUM_BUCKETS - 1)
    series: dict[str, list[float]] = {
        "t_s": [start_s + (at + 0.5) * width_s for at in range(_NUM_BUCKETS)]
    }
    for source in _SOURCES:
        tokens = [one.usage.by_tier.get(source, 0) if one.usage else 0 for one in ended]
        series[source] = np.bincount(places, tokens, _NUM_BUCKETS).tolist()
    prompts = [one.prompt_tokens for one in ended]
    series["prompt"] = np.bincount(places, prompts, _NUM_BUCKETS).tolist()
    reusable = [one.reusable_tokens for one in ended]
    series["reusable"] = np.bincount(places, reusable, _NUM_BUCKETS).tolist()
    return series
