"""The picture of a plan: for each tier, hits and first token against its size."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from headwater.replay.charts import COLOURS, SLO_COLOUR, new_figure, save
from headwater.replay.plan import TIERS, Plan
from headwater.replay.verdict import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Read: TypeAlias = Callable[[Point], float]

_OTHERS = "#b9bec4"
_STAR = "#f4d03f"


def draw_plan(plan: Plan, where: Path) -> list[Path]:
    """Draw one row for each tier whose size was varied; return the files written.

    Each line is one choice of all other settings. The line and the point of the recommended
    deployment are marked.
    """
    points = plan["points"]
    tiers = [tier for tier in TIERS if len({_size(point, tier) for point in points}) > 1]
    figure = new_figure(rows=max(len(tiers), 1), columns=2)
    recommended = plan["chosen"] is not None
    marked = points[plan["chosen"] if recommended else _fastest(points)]
    label = "recommended" if recommended else "fastest, misses the SLO"
    for row, tier in enumerate(tiers or ["host"]):
        hits, first = figure.axes[2 * row], figure.axes[2 * row + 1]
        _draw(
            hits, points, tier, (marked, label), lambda point: 100 * float(point["token_hit"])
        )
        hits.set_ylabel("% of prompt tokens found")
        ceiling = 100 * plan["token_hit_ceiling"]
        hits.axhline(ceiling, color="#222222", linestyle="--", label=f"ceiling {ceiling:.1f} %")
        _draw(
            first,
            points,
            tier,
            (marked, label),
            lambda point: float(point["ttft_ms"]["p99"]) / 1e3,
        )
        first.set_ylabel("first-token p99, seconds")
        for name, limit_s in plan["ttft_limits_s"].items():
            first.axhline(limit_s, color=SLO_COLOUR, label=f"SLO {name} {limit_s:g} s")
        for axes in (hits, first):
            axes.set_ylim(bottom=0)
            axes.margins(y=0.15)
            axes.legend(frameon=False, fontsize=9, loc="best")
    figure.suptitle(f"{label}: {marked['name']} (instances x device / host / storage)")
    return save(figure, where, "plan")


def _draw(
    axes: "Axes", points: Sequence[Point], tier: str, mark: tuple[Point, str], read: Read
) -> None:
    axes.set_xlabel(
        "GiB of storage, shared by all instances"
        if tier == "storage"
        else f"GiB of {tier} memory per instance"
    )
    axes.set_title(f"{tier.capitalize()} memory" if tier != "storage" else "Storage")
    marked, label = mark
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(_others(point, tier), []).append(point)
    named = False
    same = _others(marked, tier)
    for others in sorted(groups, key=lambda others: others != same):  # in the legend's order
        group = sorted(groups[others], key=lambda point: _size(point, tier))
        is_marked = others == same
        style: dict[str, Any] = {"color": _OTHERS, "linewidth": 1.2, "zorder": 1}
        if is_marked:
            style = {"color": COLOURS[tier], "linewidth": 2.4, "zorder": 2}
            style["label"] = f"the same with other {tier} sizes"
        elif not named and len(groups) > 1:
            style["label"], named = "other settings", True
        axes.plot(
            [_size(p, tier) for p in group],
            [read(p) for p in group],
            marker="o",
            clip_on=False,
            **style,
        )
    axes.plot(
        [_size(marked, tier)],
        [read(marked)],
        marker="*",
        markersize=17,
        color=_STAR,
        linestyle="",
        markeredgecolor="#222222",
        zorder=3,
        label=label,
        clip_on=False,
    )
    axes.set_xlim(left=0)


def _fastest(points: Sequence[Point]) -> int:
    return min(range(len(points)), key=lambda at: float(points[at]["ttft_ms"]["p99"]))


def _size(point: Point, tier: str) -> float:
    return float(point["settings"][f"{tier}_gib"])


def _others(point: Point, tier: str) -> tuple[Any, ...]:
    """All settings except the size of `tier`."""
    return tuple(v for k, v in sorted(point["settings"].items()) if k != f"{tier}_gib")
