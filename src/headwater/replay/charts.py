"""Pictures of a report, as PNG and SVG. Needs matplotlib, which nothing else here does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import ConfigError
from headwater.replay.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

COLOURS = {
    "device": "#1b6ca8",
    "host": "#3fa796",
    "storage": "#e0a030",
    "peer": "#8e5ea2",
    "computed": "#d7d9dc",
}
_SAVE: Mapping[str, Any] = {"png": {"dpi": 150}, "svg": {"metadata": {"Date": None}}}


def draw_report(report: Report, where: Path) -> list[Path]:
    """Hits over time, first tokens, tiers and queue, in one picture; the files written."""
    figure = new_figure(rows=2, columns=2)
    hits, firsts, tiers, queue = figure.axes
    _draw_hits(hits, report["hits_over_time"])
    _draw_firsts(firsts, report["ttft_ms_quantiles"])
    _draw_tiers(tiers, report["over_time"], report["tiers"])
    _draw_queue(queue, report["over_time"])
    settings = report["settings"]
    figure.suptitle(
        f"{report['requests']:,} requests on {settings['instances']} x {settings['machine']}: "
        f"{100 * report['token_hit']:.1f} % of prompt tokens found"
    )
    return save(figure, where, "replay")


def new_figure(*, rows: int, columns: int) -> "Figure":
    """An empty picture, or ConfigError where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise ConfigError("--picture needs matplotlib: pip install 'headwater[plots]'") from exc
    # The names inside an SVG are made from this, so that equal pictures are equal bytes.
    with rc_context({"svg.hashsalt": "headwater"}):
        figure = Figure(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
        figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    return figure


def save(figure: "Figure", where: Path, name: str) -> list[Path]:
    """Write `where`, a .png or .svg file; or both in the folder `where`."""
    from matplotlib import rc_context

    suffix = where.suffix.removeprefix(".").lower()
    if suffix and suffix not in FORMATS:
        raise ConfigError(
            f"--picture is a folder, or a file that ends in .png or .svg: {where}"
        )
    files = [where] if suffix else [where / f"{name}.{kind}" for kind in FORMATS]
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
    axes.set_title("where prompt tokens came from")
    axes.set_ylabel("share of prompt tokens")
    if not series:
        return
    totals = [max(total, 1.0) for total in series["prompt"]]
    shares = {
        name: [value / total for value, total in zip(series[name], totals, strict=True)]
        for name in ("device", "host", "storage", "peer")
        if any(series[name])
    }
    if shares:
        minutes = [t / 60 for t in series["t_s"]]
        colours = [COLOURS[name] for name in shares]
        axes.stackplot(minutes, *shares.values(), labels=list(shares), colors=colours)
        axes.legend(loc="upper left", frameon=False, fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_xlabel("minutes")


def _draw_firsts(axes: "Axes", quantiles_ms: Sequence[float]) -> None:
    axes.set_title("time to the first token")
    axes.set_xlabel("seconds")
    axes.set_ylabel("share of requests")
    if not quantiles_ms:
        return
    seconds = [max(ms, 0.01) / 1e3 for ms in quantiles_ms]
    axes.plot(seconds, [at / 100 for at in range(101)], color=COLOURS["device"])
    axes.set_xscale("log")
    for at in (50, 99):
        axes.axvline(seconds[at], color="#888888", linewidth=0.8, linestyle=":")
        axes.annotate(f"p{at} {seconds[at]:.3g} s", (seconds[at], 0.02), fontsize=8)


def _draw_tiers(
    axes: "Axes", series: Mapping[str, Sequence[float]], tiers: Mapping[str, Any]
) -> None:
    axes.set_title("tiers")
    axes.set_ylabel("share of blocks in use")
    minutes = [t / 60 for t in series["t_s"]]
    for name, tier in tiers.items():
        if tier["blocks"]:
            axes.plot(minutes, series[name], label=name, color=COLOURS[name])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("minutes")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _draw_queue(axes: "Axes", series: Mapping[str, Sequence[float]]) -> None:
    axes.set_title("requests")
    minutes = [t / 60 for t in series["t_s"]]
    axes.plot(minutes, series["waiting"], label="waiting", color=COLOURS["storage"])
    axes.plot(minutes, series["running"], label="running", color=COLOURS["device"])
    axes.set_xlabel("minutes")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
