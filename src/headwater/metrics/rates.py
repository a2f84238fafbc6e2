"""Computes rates, shares and percentiles from two answers of GET /stats.

The counters of an engine start at 0 again when the engine is replaced. A counter that decreased
is assumed to have started again in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOURCES = ("device", "host", "storage", "peer", "computed")

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of the observations between two answers, as exact as the buckets allow."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRates:
    """Rates per second between two answers of one server."""

    output_tokens: float
    prompt_tokens: float
    by_source: Mapping[str, float]
    """Prompt tokens by where their KV came from. On a prefill instance these are the prompts
    that decode instances sent to it."""

    computed_by_reason: Mapping[str, float]
    """Prompt tokens that were computed, by the reason why the first of them was not found."""

    links: Mapping[str, float]
    """Bytes per second, by link."""

    ttft: Quantiles | None
    itl: Quantiles | None

    @property
    def hit_share(self) -> float | None:
        """Share of the prompt tokens that were found; None if there were none."""
        total = sum(self.by_source.values())
        return 1 - self.by_source["computed"] / total if total > 0 else None


def _is_restart(before: Answer, now: Answer) -> bool:
    """Whether another server answered: its counters started again."""
    return bool(before["started_s"] != now["started_s"] or now["uptime_s"] < before["uptime_s"])


def rates_between(before: Answer, now: Answer) -> ServerRates | None:
    """The rates between two answers; None if no time passed, or another server answered."""
    elapsed_s: float = now["uptime_s"] - before["uptime_s"]
    if _is_restart(before, now) or elapsed_s <= 0:
        return None

    def total(name: str) -> float:
        return _rise(before["totals"][name], now["totals"][name]) / elapsed_s

    def by_label(name: str, labels: Iterable[str]) -> dict[str, float]:
        old, new = before["totals"][name], now["totals"][name]
        return {
            label: _rise(old.get(label, 0), new.get(label, 0)) / elapsed_s for label in labels
        }

    old_sources, new_sources = prompt_sources(before), prompt_sources(now)
    by_source = {
        name: _rise(old_sources.get(name, 0), new_sources.get(name, 0)) / elapsed_s
        for name in SOURCES
    }
    old_links: Mapping[str, Any] = before["cache"]["links"]
    return ServerRates(
        output_tokens=total("generation_tokens_total"),
        prompt_tokens=sum(by_source.values()),
        by_source=by_source,
        computed_by_reason=by_label(
            "prompt_tokens_computed_total", now["totals"]["prompt_tokens_computed_total"]
        ),
        links={
            name: _rise(old_links.get(name, link)["num_bytes"], link["num_bytes"]) / elapsed_s
            for name, link in now["cache"]["links"].items()
        },
        ttft=quantiles(before["latencies"]["ttft"], now["latencies"]["ttft"]),
        itl=quantiles(before["latencies"]["itl"], now["latencies"]["itl"]),
    )


def prompt_sources(answer: Answer) -> Mapping[str, float]:
    """Prompt tokens of one answer by source, since the start.

    The prompts of a prefill instance come from decode instances and not over HTTP, so its engine
    counts them.
    """
    if answer["role"] != "prefill":
        totals: Mapping[str, float] = answer["totals"]["prompt_tokens_by_source_total"]
        return totals
    ledger = answer["cache"]["ledger"]
    found: Mapping[str, float] = ledger["found_tokens"]
    return {**found, "computed": max(ledger["query_tokens"] - sum(found.values()), 0)}


def _rise(before: float, now: float) -> float:
    return now - before if now >= before else now


def quantiles(before: Mapping[str, Any], now: Mapping[str, Any]) -> Quantiles | None:
    """Quantiles of the observations between two answers; None if there were none."""
    counts = [new - old for new, old in zip(now["counts"], before["counts"], strict=True)]
    if sum(counts) <= 0:
        return None
    bounds: Sequence[float] = now["bounds"]
    return Quantiles(
        p50_s=_quantile(counts, bounds, 0.5),
        p99_s=_quantile(counts, bounds, 0.99),
    )


def _quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The value below which `share` of the observations are. They are assumed to be evenly
    distributed within their bucket."""
    left = share * sum(counts)
    for place, count in enumerate(counts):
        if count and left <= count:
            low = bounds[place - 1] if place else 0.0
            high = bounds[min(place, len(bounds) - 1)]
            return low + (high - low) * left / count
        left -= count
    return bounds[-1]
