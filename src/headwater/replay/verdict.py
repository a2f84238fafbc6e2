"""The recommendation of a plan: one deployment, and one sentence with the reason."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Point: TypeAlias = dict[str, Any]
"""The settings of one deployment and the results of its replay."""

_NEAR_BEST = 1.05
"""Without an SLO, a first token within 5 % of the best is good enough."""

_NOT_FASTER = 0.99
"""The verdict mentions no gain in the first token below 1 %."""


def choose(points: Sequence[Point]) -> int | None:
    """The index of the recommended deployment, or None if no deployment meets the SLO.

    With an SLO: the cheapest within it. Without: the cheapest whose time to first token (p99) is
    within 5 % of the best.
    """
    # A deployment that refuses requests looks fast, because it serves less.
    fewest = min(point["refused"] for point in points)
    served = [at for at, point in enumerate(points) if point["refused"] == fewest]
    if points[0]["slo"] is not None:
        suitable = [at for at in served if points[at]["slo"]["met"]]
    else:
        best = min(_ttft_p99_s(points[at]) for at in served)
        suitable = [at for at in served if _ttft_p99_s(points[at]) <= _NEAR_BEST * best]
    return min(suitable, key=lambda at: _cost(points[at]), default=None)


def verdict(points: Sequence[Point], chosen: int | None) -> str:
    """One sentence: the recommended deployment, its gain, and what more money would buy."""
    fewest = min(point["refused"] for point in points)
    points, all_points = [point for point in points if point["refused"] == fewest], points
    cheapest = min(points, key=_cost)
    best = min(points, key=_ttft_p99_s)
    if chosen is None:
        return (
            f"No deployment that was tried meets the SLO: the fastest, {best['name']}, has a "
            f"first-token p99 of {_ttft_p99_s(best):.2f} s and finds "
            f"{_hits(best)} of prompt tokens. {_no_help(cheapest, best)}"
        )
    point = all_points[chosen]
    if point is cheapest:
        gain = "it is also the cheapest that was tried"
    else:
        gain = (
            f"compared with {cheapest['name']} the first-token p99 changes from "
            f"{_ttft_p99_s(cheapest):.2f} to {_ttft_p99_s(point):.2f} s "
            f"({_change(cheapest, point)}) and hits from {_hits(cheapest)} to {_hits(point)}"
        )
    meets = " and meets the SLO" if point["slo"] is not None else ""
    return f"{point['name']} is enough{meets}: {gain}; {_more(point, best)}."


def _more(point: Point, best: Point) -> str:
    if best["price"] <= point["price"]:
        return "no deployment that costs more is faster"
    if _ttft_p99_s(best) > _NOT_FASTER * _ttft_p99_s(point):
        return "no deployment that costs more is faster by 1 %"
    return (
        f"{best['name']} at {best['price'] / max(point['price'], 1e-9):.2f} times the price "
        f"changes the first-token p99 by {_change(point, best)}"
    )


def _no_help(cheapest: Point, best: Point) -> str:
    """The sentence for a plan without a recommended deployment: whether more memory helps at
    all."""
    if _ttft_p99_s(best) > 0.9 * _ttft_p99_s(cheapest):
        return "More memory does not help here: look at prompt lengths and the number of instances."
    return "Try larger tiers or more instances."


def _change(before: Point, after: Point) -> str:
    return f"{100 * (_ttft_p99_s(after) / max(_ttft_p99_s(before), 1e-9) - 1):+.0f} %"


def _ttft_p99_s(point: Point) -> float:
    return float(point["ttft_ms"]["p99"]) / 1e3


def _hits(point: Point) -> str:
    return f"{100 * point['token_hit']:.1f} %"


def _cost(point: Point) -> tuple[float, float]:
    return float(point["price"]), _ttft_p99_s(point)
