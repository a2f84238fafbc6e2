"""A plan as lines for people, and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.replay.charts import COLOURS, new_figure, save
from headwater.replay.plan import TIERS, Plan, Point, settings_of, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD = ("price", "found", "ttft p50", "ttft p99", "itl p99", "tokens/s", "good", "SLO")


def plan_table(plan: Plan) -> str:
    """Every deployment by price, what a TiB more buys, and what was not modelled."""
    points = sorted(plan["points"], key=lambda point: (point["price"], -value_of(point)))
    width = max(len(settings_of(point)) for point in points)
    lines = [
        f"headwater plan: {len(points)} deployments; instances x device / host / storage",
        "",
        f"    {'':<{width}}" + "".join(f"{name:>11}" for name in _HEAD),
    ]
    for point in points:
        mark = "*" if point["pareto"] else " "
        lines.append(f"  {mark} {settings_of(point):<{width}}{_row(point)}")
    lines += ["", "  * on the edge: nothing that was tried is better for the price", ""]
    lines += _cheapest(plan) + _gains(plan["per_tib"])
    prices = ", ".join(f"{name} {price:g}" for name, price in plan["prices"].items())
    lines += ["", f"  prices: {prices} (an instance; a GiB of each tier)", "  not modelled:"]
    lines += [f"    - {thing}" for thing in plan["not_modelled"]]
    return "\n".join([*lines, ""])


def draw_plan(plan: Plan, where: Path) -> list[Path]:
    """Price against what it buys, and hits over the size of each tier; the files written."""
    figure = new_figure(rows=1, columns=2)
    value, hits = figure.axes
    _draw_value(value, plan["points"])
    _draw_hits(hits, plan["points"])
    return save(figure, where, "plan")


def _row(point: Point) -> str:
    slo = point["slo"]
    cells = [
        f"{point['price']:,.0f}",
        f"{100 * point['token_hit']:.2f} %",
        f"{point['ttft_ms']['p50'] / 1e3:,.2f} s",
        f"{point['ttft_ms']['p99'] / 1e3:,.2f} s",
        f"{point['itl_ms']['p99']:,.1f} ms",
        f"{point['throughput']:,.0f}",
        "" if slo is None else f"{100 * slo['good_share']:.1f} %",
        "" if slo is None else "kept" if slo["met"] else "no",
    ]
    return "".join(f"{cell:>11}" for cell in cells)


def _cheapest(plan: Plan) -> list[str]:
    at = plan["cheapest_within_slo"]
    if at is not None:
        point = plan["points"][at]
        return [
            f"  cheapest that keeps the SLO: {settings_of(point)}, {point['price']:,.0f}",
            "",
        ]
    if plan["points"][0]["slo"] is not None:
        return ["  nothing that was tried keeps the SLO", ""]
    return []


def _gains(per_tib: dict[str, Sequence[Plan]]) -> list[str]:
    lines = []
    for tier in TIERS:
        for gain in per_tib[tier]:
            parts = [
                f"{100 * gain['token_hit']:+.2f} points of hits",
                f"{gain['ttft_p50_ms'] / 1e3:+,.2f} s TTFT p50",
                f"{gain['ttft_p99_ms'] / 1e3:+,.2f} s p99",
                f"{gain['throughput']:+,.1f} tokens/s",
            ]
            if "goodput_requests_per_s" in gain:
                parts.append(f"{gain['goodput_requests_per_s']:+.3f} good requests/s")
            steps = f"{gain['from_gib']:,.0f} to {gain['to_gib']:,.0f} GiB"
            lines.append(f"  one TiB more of {tier:<7} ({steps}): {', '.join(parts)}")
    return lines


def _draw_value(axes: "Axes", points: Sequence[Point]) -> None:
    has_slo = points[0]["slo"] is not None
    axes.set_title("what the price buys")
    axes.set_xlabel("price")
    axes.set_ylabel("good requests/s" if has_slo else "TTFT p99, seconds")
    scale = 1.0 if has_slo else -1e-3
    for edge, colour in ((False, COLOURS["computed"]), (True, COLOURS["device"])):
        chosen = [point for point in points if point["pareto"] is edge]
        places = sorted((point["price"], scale * value_of(point)) for point in chosen)
        style: dict[str, Any] = {
            "marker": "o",
            "color": colour,
            "linestyle": "-" if edge else "",
        }
        axes.plot([x for x, _ in places], [y for _, y in places], **style)
    for point in points:
        if point["pareto"]:
            at = (point["price"], scale * value_of(point))
            axes.annotate(settings_of(point), at, fontsize=6, rotation=15)


def _draw_hits(axes: "Axes", points: Sequence[Point]) -> None:
    axes.set_title("hits by size of each tier, averages")
    axes.set_xlabel("GiB (of each instance; of storage in all)")
    axes.set_ylabel("share of prompt tokens found")
    for tier in TIERS:
        by_size: dict[float, list[float]] = {}
        for point in points:
            size = point["settings"][f"{tier}_gib"]
            by_size.setdefault(size, []).append(point["token_hit"])
        if len(by_size) > 1:
            sizes = sorted(by_size)
            means = [sum(by_size[size]) / len(by_size[size]) for size in sizes]
            axes.plot(sizes, means, marker="o", label=tier, color=COLOURS[tier])
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)
