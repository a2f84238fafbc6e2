"""Draws a report as PNG and SVG. Only this module and `plan_charts` need matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.errors import ConfigError
from headwater.replay.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

COLOURS = {
    "held": "#0b3c5d",
    "device": "#1b6ca8",
    "host": "#e0a030",
    "storage": "#3fa796",
    "peer": "#8e5ea2",
    "computed": "#d7d9dc",
}
"""As on the dashboard: device blue, host orange, storage green."""

SLO_COLOUR = "#c0392b"
_SAVE: Mapping[str, Any] = {"png": {"dpi": 150}, "svg": {"metadata": {"Date": None}}}


def draw_report(report: Report, where: Path) -> list[Path]:
    """Draw hits over time, times to the first token, tiers and queue in one picture; return the
    files written."""
    figure = new_figure(rows=2, columns=2)
    hits, first_tokens, tiers, queue = figure.axes
    _draw_hits(hits, report["hits_over_time"])
    _draw_first_tokens(first_tokens, report)
    _draw_tiers(tiers, report["over_time"])
    _draw_queue(queue, report)
    settings = report["settings"]
    figure.suptitle(
        f"{report['requests']:,} requests on {settings['instances']} x {settings['machine']}: "
        f"{100 * report['token_hit']:.1f} % of prompt tokens found, "
        f"{100 * report['token_hit_ceiling']:.1f} % possible"
    )
    return save(figure, where, "replay")


def check_picture(where: Path) -> None:
    """Raise ConfigError if nothing can be drawn to `where`. Called before the simulation, which may
    take minutes."""
    try:
        import matplotlib  # noqa: F401 -- only asked whether it is there
    except ModuleNotFoundError as exc:
        raise ConfigError("--picture needs matplotlib: pip install 'headwater[plots]'") from exc
    suffix = where.suffix.removeprefix(".").lower()
    if suffix and suffix not in FORMATS:
        raise ConfigError(
            f"--picture must be a folder or a file that ends in .png or .svg, got {where}"
        )


def new_figure(*, rows: int, columns: int) -> "Figure":
    """An empty picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Ids inside an SVG are made from this, so that equal pictures have equal bytes.
    with rc_context({"svg.hashsalt": "headwater"}):
        figure = Figure(figsize=(6.0 * columns, 4.2 * rows), layout="constrained")
        figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    return figure


def save(figure: "Figure", where: Path, name: str) -> list[Path]:
    """Write to `where`: a .png or .svg file, or a folder for both."""
    from matplotlib import rc_context

    files = [where] if where.suffix else [where / f"{name}.{kind}" for kind in FORMATS]
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for path in files:
            kind = path.suffix.removeprefix(".").lower()
            with rc_context({"svg.hashsalt": "headwater", "svg.fonttype": "none"}):
                figure.savefig(path, format=kind, **_SAVE[kind])
    except OSError as exc:
        raise ConfigError(f"cannot write the picture {where}: {exc.strerror}") from exc
    return files


def _draw_hits(axes: "Axes", series: Mapping[str, Sequence[float]]) -> None:
    axes.set_title("Sources of prompt tokens")
    axes.set_ylabel("share of prompt tokens")
    axes.set_ylim(0, 1)
    if not series:
        return
    # Intervals without a first token have no sources: nothing is drawn there.
    parts = [at for at, prompt in enumerate(series["prompt"]) if prompt]
    totals = np.array(series["prompt"])[parts]
    shares = {
        name: np.array(series[name])[parts] / totals
        for name in ("device", "host", "storage", "peer")
        if any(series[name])
    }
    shares["computed"] = 1.0 - sum(shares.values(), np.zeros(len(totals)))
    times, unit = _times(series)
    axes.set_xlabel(unit)
    width = times[1] - times[0]
    times = times[parts]
    bottom = np.zeros(len(totals))
    for name, share in shares.items():
        axes.bar(times, share, width, bottom, color=COLOURS[name], label=name)
        bottom += share
    ceiling = np.array(series["reusable"])[parts] / totals
    left, right = times - width / 2, times + width / 2
    axes.hlines(ceiling, left, right, color="#222222", linewidth=1.2, label="ceiling")
    axes.set_xlim(left[0], right[-1])
    legend_above(axes)


def _times(series: Mapping[str, Sequence[float]]) -> tuple[np.ndarray, str]:
    """The times of a series and their unit: seconds up to two minutes, then minutes."""
    times_s = np.array(series["t_s"])
    if len(times_s) and times_s[-1] > 120:
        return times_s / 60, "minutes"
    return times_s, "seconds"


def _draw_first_tokens(axes: "Axes", report: Report) -> None:
    axes.set_title("Time to the first token")
    axes.set_xlabel("seconds")
    axes.set_ylabel("share of requests that are faster")
    axes.set_ylim(0, 1)
    quantiles_ms = report["ttft_ms_quantiles"]
    if not quantiles_ms:
        return
    seconds = [max(ms, 0.01) / 1e3 for ms in quantiles_ms]
    axes.plot(seconds, [at / 100 for at in range(101)], color=COLOURS["device"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for at, style in ((50, ":"), (99, "-.")):
        label = f"p{at} {_duration(seconds[at])}"
        axes.axvline(seconds[at], color="#666666", linewidth=1, linestyle=style, label=label)
    for name, bound in report.get("slo", {}).get("bounds", {}).items():
        if name.startswith("ttft"):
            limit_s = bound["limit_ms"] / 1e3
            label = f"SLO {name} {_duration(limit_s)}"
            axes.axvline(limit_s, color=SLO_COLOUR, linewidth=1.5, label=label)
    legend_above(axes)


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _draw_tiers(axes: "Axes", series: Mapping[str, Sequence[float]]) -> None:
    """Draw the memory in use by purpose. A tier that is full of idle blocks is normal."""
    axes.set_title("KV in each tier")
    axes.set_ylabel("GiB in use, all instances")
    times, unit = _times(series)
    axes.set_xlabel(unit)
    held = np.array(series["held_gib"])
    parts = {
        "held by requests": (held, COLOURS["held"]),
        "cached on device": (np.array(series["device_gib"]) - held, COLOURS["device"]),
        "host": (np.array(series["host_gib"]), COLOURS["host"]),
        "storage": (np.array(series["storage_gib"]), COLOURS["storage"]),
    }
    drawn = {name: part for name, part in parts.items() if part[0].any()}
    if drawn:
        axes.stackplot(
            times,
            *(values for values, _ in drawn.values()),
            labels=list(drawn),
            colors=[colour for _, colour in drawn.values()],
        )
        axes.set_xlim(times[0], max(times[-1], times[0] + 1e-6))
        legend_above(axes)
    axes.set_ylim(bottom=0)


def _draw_queue(axes: "Axes", report: Report) -> None:
    overloaded = report["queue"]["overloaded"]
    axes.set_title(
        "Requests: overloaded, the queue grew with arrivals" if overloaded else "Requests"
    )
    axes.set_ylabel("requests")
    series = report["over_time"]
    times, unit = _times(series)
    axes.set_xlabel(unit)
    axes.plot(times, series["waiting"], label="waiting", color=COLOURS["host"])
    axes.plot(times, series["running"], label="running", color=COLOURS["device"])
    axes.set_ylim(bottom=0)
    if len(times):
        axes.set_xlim(times[0], max(times[-1], times[0] + 1e-6))
    legend_above(axes)


def legend_above(axes: "Axes") -> None:
    """Draw a legend of one row between title and axes, so that it covers neither a line nor the
    title."""
    axes.set_title(axes.get_title(), pad=26)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(axes.get_legend_handles_labels()[1]),
        frameon=False,
        fontsize=9,
        columnspacing=1.2,
        handlelength=1.4,
        borderaxespad=0.2,
    )
