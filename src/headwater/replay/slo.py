"""Service level objectives: bounds on latency percentiles, and which requests meet them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.errors import ConfigError
from headwater.replay.request import SimRequest

METRICS = ("ttft", "itl", "e2e")
"""Latencies: time to the first token, time between tokens, time of the whole request."""

_TERM = re.compile(r"(ttft|itl|e2e)_p(\d{1,2}(?:\.\d+)?)=(\d+(?:\.\d+)?)(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Bound:
    """A percentile of one latency is at most `limit_s`."""

    metric: str
    percentile: float
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.metric}_p{self.percentile:g}"

    def is_kept_by(self, served: SimRequest) -> bool:
        """Whether one request met the bound. A request has one time to the first token and one
        end, but many gaps between tokens: the percentile of its own gaps is compared."""
        if not served.finished:
            return False
        if self.metric == "ttft":
            return served.ttft_s <= self.limit_s
        if self.metric == "e2e":
            return served.last_s - served.arrival_s <= self.limit_s
        if not served.gaps_s:
            return True
        return float(np.percentile(served.gaps_s, self.percentile)) <= self.limit_s


def parse_slo(text: str) -> tuple[Bound, ...]:
    """Parses `ttft_p99=2s,itl_p99=50ms`. Raises ConfigError with an example."""
    bounds = []
    for term in filter(None, text.split(",")):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ConfigError(
                f"--slo {term!r} is not METRIC_PERCENTILE=TIME; write for example "
                f"ttft_p99=2s,itl_p99=50ms. Metrics are {', '.join(METRICS)}, units us, ms and s"
            )
        metric, percentile, number, unit = match.groups()
        bounds.append(Bound(metric, float(percentile), float(number) * _UNITS[unit]))
    return tuple(bounds)


def attainment(
    bounds: Sequence[Bound],
    served: Sequence[SimRequest],
    latencies_s: dict[str, np.ndarray[Any, Any]],
    duration_s: float,
) -> dict[str, Any]:
    """Whether each bound holds over all requests, and the goodput: the rate of requests that
    met all bounds themselves."""
    good = [one for one in served if all(bound.is_kept_by(one) for bound in bounds)]
    refused_share = sum(not one.finished for one in served) / max(len(served), 1)
    held = {}
    for bound in bounds:
        values = latencies_s[bound.metric]
        actual_s = float(np.percentile(values, bound.percentile)) if len(values) else 0.0
        held[bound.name] = {
            "limit_ms": bound.limit_s * 1e3,
            "actual_ms": actual_s * 1e3,
            # A request that is never served exceeds every bound.
            "met": actual_s <= bound.limit_s and refused_share <= 1 - bound.percentile / 100,
        }
    return {
        "bounds": held,
        "met": all(bound["met"] for bound in held.values()),
        "good_share": len(good) / max(len(served), 1),
        "goodput_requests_per_s": len(good) / duration_s,
        "goodput_tokens_per_s": sum(one.num_output for one in good) / duration_s,
    }
