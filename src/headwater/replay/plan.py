"""Replays one trace with many tier sizes and compares the results."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import pairwise, product
from multiprocessing import get_context
from statistics import fmean
from typing import Any, TypeAlias

from headwater.errors import ConfigError
from headwater.replay.prices import Prices
from headwater.replay.report import describe, make_report, size_text
from headwater.replay.settings import SimConfig
from headwater.replay.simulator import Simulator
from headwater.replay.slo import Bound
from headwater.replay.verdict import Point, choose, verdict
from headwater.replay.workload import TraceLoad

Plan: TypeAlias = dict[str, Any]
TIERS = ("device", "host", "storage")
_TIB = 1024.0
_MAX_POINTS = 512
_POLICIES = ("eviction", "write_policy", "load_policy")

_NOT_MODELLED = (
    "prices of network and power, and the cost of a failed machine",
    "clients that wait for an answer before the next request: arrivals come from the trace",
    "growth of traffic: try --speed and --scale",
    "reuse of generated text, in traces that do not contain the output",
    "jitter, and everything else that docs/replay.md lists as not modelled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values to try for each setting; all valid combinations are tried."""

    device_gib: Sequence[float | None]
    host_gib: Sequence[float]
    storage_gib: Sequence[float]
    clusters: Sequence[tuple[int, int]]
    """Number of instances, and how many of them only prefill."""

    eviction: Sequence[str]
    write_policy: Sequence[str]
    load_policy: Sequence[str]

    def configs(self, base: SimConfig) -> list[SimConfig]:
        """`base` with each combination; storage without a host tier is left out."""
        combinations = product(
            self.device_gib,
            self.host_gib,
            self.storage_gib,
            self.clusters,
            self.eviction,
            self.write_policy,
            self.load_policy,
        )
        made = [
            replace(
                base,
                device_gib=device,
                host_gib=host,
                storage_gib=storage,
                num_instances=instances,
                num_prefill=prefill,
                eviction=eviction,
                write_policy=write_policy,
                load_policy=load_policy,
            )
            for device, host, storage, (
                instances,
                prefill,
            ), eviction, write_policy, load_policy in combinations
            if host or not storage
        ]
        if len(made) > _MAX_POINTS:
            raise ConfigError(
                f"the values give {len(made)} combinations; the limit is {_MAX_POINTS}: give fewer values"
            )
        return made


def make_plan(
    configs: Sequence[SimConfig],
    load: TraceLoad,
    bounds: Sequence[Bound],
    prices: Prices,
    *,
    num_jobs: int,
    advance: Callable[[], object] = lambda: None,
) -> Plan:
    """Replay `load` with each of `configs`, in `num_jobs` processes, and compare the
    results."""
    points = _evaluate_all(configs, load, bounds, num_jobs, advance)
    for point, config in zip(points, configs, strict=True):
        point["price"] = prices.of(config)
    _mark_pareto(points)
    varied = [name for name in _POLICIES if len({p["settings"][name] for p in points}) > 1]
    for point in points:
        point["name"] = name_of(point["settings"], varied)
    chosen = choose(points)
    return {
        "points": points,
        "per_tib": {tier: _per_tib(points, tier) for tier in TIERS},
        "chosen": chosen,
        "cheapest_within_slo": chosen if bounds else None,
        "verdict": verdict(points, chosen),
        "policies": _policies(points[0]["settings"], varied),
        "token_hit_ceiling": max(point["token_hit_ceiling"] for point in points),
        "ttft_limits_s": {b.name: b.limit_s for b in bounds if b.metric == "ttft"},
        "prices": dict(prices.by_name),
        "not_modelled": list(_NOT_MODELLED),
    }


def evaluate(config: SimConfig, load: TraceLoad, bounds: Sequence[Bound]) -> Point:
    """Replay once, and return the part of the report that a plan uses. Runs in a separate
    process."""
    requests = load.requests()
    report = make_report(Simulator(config, requests).run(), bounds)
    kept = (
        "token_hit",
        "token_hit_ceiling",
        "block_hit",
        "tokens_by_source",
        "throughput",
        "requests_per_s",
    )
    latencies = {
        name: {at: report[name][at] for at in ("p50", "p90", "p99")}
        for name in ("ttft_ms", "itl_ms")
    }
    return {
        "settings": describe(config),
        **{name: report[name] for name in kept},
        **latencies,
        "preemptions": report["preemptions"],
        "refused": report["refused"],
        "slo": report.get("slo"),
    }


def value_of(point: Point) -> float:
    """The value to maximise: goodput with an SLO, otherwise the negative of TTFT p99."""
    slo = point["slo"]
    if slo is not None:
        return float(slo["goodput_requests_per_s"])
    return -float(point["ttft_ms"]["p99"])


def _evaluate_all(
    configs: Sequence[SimConfig],
    load: TraceLoad,
    bounds: Sequence[Bound],
    num_jobs: int,
    advance: Callable[[], object],
) -> list[Point]:
    points: dict[int, Point] = {}
    workers = min(num_jobs, len(configs))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        runs = {pool.submit(evaluate, c, load, bounds): at for at, c in enumerate(configs)}
        try:
            for run in as_completed(runs):
                points[runs[run]] = run.result()
                advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [points[at] for at in range(len(configs))]


def _mark_pareto(points: Sequence[Point]) -> None:
    """Mark the Pareto front: the deployments for which no other one is better at the same or a
    lower price, or cheaper and at least as good."""
    for point in points:
        mine = -point["price"], value_of(point)
        point["pareto"] = not any(
            other != mine and other[0] >= mine[0] and other[1] >= mine[1]
            for other in ((-rival["price"], value_of(rival)) for rival in points)
        )


def _per_tib(points: Sequence[Point], tier: str) -> list[Plan]:
    """For each step from one size of `tier` to the next, the gain per TiB, averaged over all
    other settings that were tried."""
    groups: dict[tuple[Any, ...], dict[float, Point]] = {}
    for point in points:
        settings = point["settings"]
        others = tuple(v for k, v in sorted(settings.items()) if k != f"{tier}_gib")
        groups.setdefault(others, {})[settings[f"{tier}_gib"]] = point
    sizes = sorted({point["settings"][f"{tier}_gib"] for point in points})
    found = []
    for small, large in pairwise(sizes):
        pairs = [(g[small], g[large]) for g in groups.values() if small in g and large in g]
        if pairs:
            found.append({"from_gib": small, "to_gib": large} | _gains(pairs, tier))
    return found


def _gains(pairs: Sequence[tuple[Point, Point]], tier: str) -> Plan:
    def per_tib(read: Callable[[Point], float]) -> float:
        return fmean((read(b) - read(a)) / _tib_between(a, b, tier) for a, b in pairs)

    gains = {
        "token_hit": per_tib(lambda point: point["token_hit"]),
        "ttft_p50_ms": per_tib(lambda point: point["ttft_ms"]["p50"]),
        "ttft_p99_ms": per_tib(lambda point: point["ttft_ms"]["p99"]),
        "throughput": per_tib(lambda point: point["throughput"]),
    }
    if all(a["slo"] and b["slo"] for a, b in pairs):
        gains["goodput_requests_per_s"] = per_tib(value_of)
    return gains


def _tib_between(small: Point, large: Point, tier: str) -> float:
    """Difference in total memory: of every instance, but storage counts once."""
    name = f"{tier}_gib"
    count = 1 if tier == "storage" else large["settings"]["instances"]
    return float((large["settings"][name] - small["settings"][name]) * count / _TIB)


def name_of(settings: Point, policies: Sequence[str]) -> str:
    """A deployment in a few words: sizes, and the policies that vary."""
    tiers = " / ".join(size_text(settings[f"{tier}_gib"]) for tier in TIERS)
    cluster = str(settings["instances"])
    if settings["prefill_instances"]:
        decode = settings["instances"] - settings["prefill_instances"]
        cluster = f"{settings['prefill_instances']}P+{decode}D"
    return ", ".join([f"{cluster} x {tiers} GiB", *(settings[name] for name in policies)])


def _policies(settings: Point, varied: Sequence[str]) -> str:
    """The policies that all deployments share, as one line."""
    fixed = [f"{n.replace('_', ' ')} {settings[n]}" for n in _POLICIES if n not in varied]
    return ", ".join(fixed) or "policies differ"
