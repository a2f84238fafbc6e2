"""A plan as lines of text."""

from collections.abc import Sequence

from headwater.replay.plan import TIERS, Plan, value_of
from headwater.replay.report import size_text
from headwater.replay.verdict import Point

_HEAD = ("price", "found", "ttft p50", "ttft p99", "itl p99", "tokens/s", "good", "SLO")


def plan_table(plan: Plan) -> str:
    """The lines of a plan: every deployment in order of price, the gain of one more TiB of each
    tier, and the recommendation last."""
    points = sorted(plan["points"], key=lambda point: (point["price"], -value_of(point)))
    width = max(len(point["name"]) for point in points)
    lines = [
        f"headwater plan: {len(points)} deployments; instances x device / host / storage",
        f"  {plan['policies']}",
        "",
        f"    {'':<{width}}" + "".join(f"{name:>11}" for name in _HEAD),
    ]
    unit = _FirstTokenUnit(points)
    for point in points:
        mark = "*" if point["pareto"] else " "
        lines.append(f"  {mark} {point['name']:<{width}}{_row(point, unit)}")
    lines += [
        "",
        "  * on the Pareto front: no deployment that was tried is better at the same or a lower price",
        (
            f"  ceiling: a cache without a size limit could find "
            f"{100 * plan['token_hit_ceiling']:.2f} % of prompt tokens"
        ),
        *_refusals(points),
        "",
        *_gains(plan["per_tib"], unit),
    ]
    prices = ", ".join(f"{name} {price:g}" for name, price in plan["prices"].items())
    lines += ["", f"  prices: {prices} (per instance; per GiB of each tier)", "  not modelled:"]
    lines += [f"    - {thing}" for thing in plan["not_modelled"]]
    return "\n".join([*lines, "", plan["verdict"], ""])


class _FirstTokenUnit:
    """Milliseconds when all first tokens of a plan are fast, seconds otherwise."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._is_ms = all(point["ttft_ms"]["p99"] < 1e3 for point in points)

    def text(self, ms: float, *, sign: str = "") -> str:
        """`ms` in this unit; `sign` is `+` for a difference."""
        return f"{ms:{sign}z,.1f} ms" if self._is_ms else f"{ms / 1e3:{sign}z,.2f} s"


def _row(point: Point, unit: _FirstTokenUnit) -> str:
    slo = point["slo"]
    cells = [
        f"{point['price']:,.0f}",
        f"{100 * point['token_hit']:.2f} %",
        unit.text(point["ttft_ms"]["p50"]),
        unit.text(point["ttft_ms"]["p99"]),
        f"{point['itl_ms']['p99']:,.1f} ms",
        f"{point['throughput']:,.0f}",
        "" if slo is None else f"{100 * slo['good_share']:.1f} %",
        "" if slo is None else "met" if slo["met"] else "no",
    ]
    return "".join(f"{cell:>11}" for cell in cells)


def _refusals(points: Sequence[Point]) -> list[str]:
    small = sum(point["refused"] > 0 for point in points)
    if not small:
        return []
    who = "1 deployment is" if small == 1 else f"{small} deployments are"
    return [f"  {who} too small for some requests and refused them"]


def _gains(per_tib: dict[str, Sequence[Plan]], unit: _FirstTokenUnit) -> list[str]:
    lines = []
    for tier in TIERS:
        for gain in per_tib[tier]:
            parts = [
                f"{100 * gain['token_hit']:+z.2f} points of hits",
                f"{unit.text(gain['ttft_p50_ms'], sign='+')} TTFT p50",
                f"{unit.text(gain['ttft_p99_ms'], sign='+')} p99",
                f"{gain['throughput']:+z,.1f} tokens/s",
            ]
            if "goodput_requests_per_s" in gain:
                parts.append(f"{gain['goodput_requests_per_s']:+z.3f} good requests/s")
            steps = f"{size_text(gain['from_gib'])} to {size_text(gain['to_gib'])} GiB"
            lines.append(f"  one TiB more of {tier:<7} ({steps}): {', '.join(parts)}")
    return lines
