"""What `headwater top` draws: panes of text and bars, from one answer of a server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headwater.metrics.history import INTERVAL_S
from headwater.metrics.rates import SOURCES, prompt_sources

_COLOURS = {
    "device": "blue",
    "host": "yellow",
    "storage": "green",
    "peer": "magenta",
    "computed": "bright_black",
}
_TICKS = "▁▂▃▄▅▆▇█"
_BAR = 12
_NONE = "-"
_RECENT_POINTS = int(30 / INTERVAL_S)
"""Points of the history, half a minute, from which the share of found tokens is computed."""
_WIDE = 100
"""Number of columns from which request ids are shown completely."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


def screen(
    now: Mapping[str, Any], points: Sequence[Mapping[str, Any]], url: str, state: str
) -> RenderableType:
    """The whole view: an answer of GET /stats, and the points of its history."""
    cache = now["cache"]
    last = points[-1] if points else None
    rates = last["rates"]["links"] if last else {}
    return Group(
        _head(now, url, "paused" if cache["is_paused"] and state == "live" else state),
        _tiles(now, points),
        Columns(
            [
                _pane("tiers", _tiers(cache["tiers"], cache["storage"])),
                _pane("transfers", _links(cache["links"], rates)),
                _pane("misses", _misses(cache["ledger"]["misses"])),
            ]
        ),
        _pane("running and waiting", _sequences(now["sequences"]), expand=True),
        _pane("ended lately", _recent(now["recent"]), expand=True),
    )


def _head(now: Mapping[str, Any], url: str, state: str) -> Text:
    mark = {"live": ("●", "green"), "paused": ("■", "yellow")}.get(state, ("◆", "red"))
    return Text.assemble(
        ("headwater ", "bold"),
        f"{now['model']} on {now['device']} at {url}, up {duration(now['uptime_s'])}  ",
        mark,
        f" {state}",
    )


def _tiles(now: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Table:
    cache, device = now["cache"], now["cache"]["tiers"]["device"]
    used = device["num_blocks"] - device["free"] - device["evictable"]
    last = points[-1] if points else None
    outputs = [point["rates"]["output_tokens"] for point in points]
    recent = _recent_tokens(points)
    sources = recent if sum(recent.values()) else prompt_sources(now)
    cells: dict[str, tuple[str, str | Text]] = {
        "tokens/s": (
            f"{outputs[-1]:,.0f}" if outputs else _NONE,
            Text(_spark(outputs[-12:]), style="blue"),
        ),
        "first token": _latency(last and last["minute_ttft"]),
        "between": _latency(last and last["minute_itl"]),
        "found": (percent(_found_share(sources)), _sources(sources)),
        "running": (f"{cache['num_running']:,}", f"{cache['num_waiting']:,} waiting"),
        "device": (
            percent(used / device["num_blocks"]),
            f"{used:,} of {device['num_blocks']:,}",
        ),
    }
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    for name in cells:
        table.add_column(name, no_wrap=True)
    table.add_row(*(Text(value, style="bold") for value, _ in cells.values()))
    table.add_row(*(note for _, note in cells.values()))
    return table


def _recent_tokens(points: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Number of prompt tokens from each source, in the newest points of the history."""
    sums = dict.fromkeys(SOURCES, 0.0)
    for point in list(points)[-_RECENT_POINTS:]:
        for name in SOURCES:
            sums[name] += point["rates"]["by_source"].get(name, 0.0) * point["elapsed_s"]
    return sums


def _found_share(sources: Mapping[str, float]) -> float | None:
    total = sum(sources.values())
    return 1 - sources.get("computed", 0) / total if total else None


def _sources(sources: Mapping[str, float]) -> Text:
    """Where prompt tokens came from, as one bar. Computed tokens have a lighter shape, so that
    the bar can be read without colours."""
    bar, total = Text(), sum(sources.values())
    for name in SOURCES if total else ():
        tick = "░" if name == "computed" else "█"
        bar.append(tick * round(_BAR * sources.get(name, 0) / total), _COLOURS[name])
    return bar


def _tiers(tiers: Mapping[str, Any], storage: Mapping[str, Any] | None) -> Table:
    table = _table("", "", "held", "cached", "idle", "free", "evicted")
    for name, tier in tiers.items():
        if tier["num_blocks"]:
            busy = tier["num_blocks"] - tier["free"] - tier["evictable"]
            counts = [tier[key] for key in ("held", "cached", "evictable", "free", "evicted")]
            table.add_row(
                Text(name, _COLOURS[name]),
                _bar(busy, tier["evictable"], tier["num_blocks"], _COLOURS[name]),
                *(f"{count:,}" for count in counts),
            )
    if storage is not None:
        blocks = storage["num_blocks"]
        table.add_row(
            Text("storage", _COLOURS["storage"]),
            _storage_state(storage),
            "",
            _NONE if blocks is None else f"{blocks:,}",
        )
    return table


def _storage_state(storage: Mapping[str, Any]) -> Text:
    """The backend, and in red which calls its breakers have stopped."""
    breakers = {"reads": storage["breaker"], "writes": storage["write_breaker"]}
    stopped = [calls for calls, state in breakers.items() if state in ("open", "half_open")]
    state = f" {', '.join(stopped)} stopped" if stopped else ""
    return Text.assemble(storage["backend"], (state, "bold red"))


def _links(links: Mapping[str, Any], rates: Mapping[str, float]) -> RenderableType:
    table = _table("", "", "now", "fastest", "failed")
    for name, link in links.items():
        if name == "lookup":
            continue
        rate, most = rates.get(name, 0.0), link["fastest_bytes_s"]
        table.add_row(
            name.replace("_to_", " → "),
            _bar(min(rate, most), 0, most or 1, _COLOURS[name.partition("_to_")[0]], width=12),
            f"{size(rate)}/s",
            f"{size(most)}/s",
            f"{sum(link['failures'].values()):,}",
        )
    return table if table.row_count else Text("nothing below the device", "dim")


def _misses(misses: Mapping[str, int]) -> RenderableType:
    table = _table("", "", "")
    most = max(misses.values(), default=1)
    for reason, count in sorted(misses.items(), key=lambda entry: -entry[1]):
        table.add_row(
            reason.replace("_", " "), _bar(count, 0, most, "white", width=12), f"{count:,}"
        )
    return table if table.row_count else Text("none", "dim")


def _sequences(sequences: Iterable[Mapping[str, Any]]) -> RenderableType:
    table = _table("request", "state", "prompt", "answer", "age")
    for entry in list(sequences)[:12]:
        waits = f"waits for {entry['waits_for']}" if entry["waits_for"] else entry["state"]
        done = min(entry["computed_tokens"], entry["prompt_tokens"])
        bar = _bar(
            entry["found_tokens"], done - entry["found_tokens"], entry["prompt_tokens"], "blue"
        )
        table.add_row(
            ShortId(entry["request_id"]),
            waits,
            bar,
            f"{entry['output_tokens']:,} / {entry['max_output_tokens']:,}",
            duration(entry["age_s"]),
        )
    return table if table.row_count else Text("nothing runs and nothing waits", "dim")


def _recent(records: Iterable[Mapping[str, Any]]) -> RenderableType:
    table = _table("request", "prompt", "found", "because", "first token", "whole", "end")
    for record in list(records)[:8]:
        share = record["cached_tokens"] / max(record["prompt_tokens"], 1)
        table.add_row(
            ShortId(record["request_id"]),
            f"{record['prompt_tokens']:,}",
            percent(share),
            str(record.get("miss_reason", "")).replace("_", " "),
            duration(record.get("first_token_s")),
            duration(record["duration_s"]),
            record["finish_reason"],
        )
    return table if table.row_count else Text("none yet", "dim")


class ShortId:
    """A request id: complete in a wide terminal, shortened to its first and last characters in
    a narrow one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield Text(self._shown(console.width), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = len(self._shown(console.width))
        return Measurement(min(width, 12), width)

    def _shown(self, columns: int) -> str:
        if columns >= _WIDE or len(self._name) <= 12:
            return self._name
        return f"{self._name[:7]}…{self._name[-4:]}"


def _pane(title: str, body: RenderableType, *, expand: bool = False) -> Panel:
    return Panel(body, title=title, title_align="left", border_style="dim", expand=expand)


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_header=any(headers))
    for header in headers:
        table.add_column(header, no_wrap=True)
    return table


def _bar(full: float, faint: float, most: float, colour: str, *, width: int = 16) -> Text:
    """A bar of two parts, as shares of `most`. The second part has a lighter shape, not only
    another colour."""
    first = round(width * full / most)
    second = min(round(width * (full + faint) / most), width) - first
    return Text.assemble(
        ("█" * first, colour),
        ("▒" * second, colour),
        ("·" * (width - first - second), "dim"),
    )


def _spark(values: list[float]) -> str:
    """A line of small bars; the highest one is full."""
    most = max(values, default=0.0)
    if most <= 0:
        return ""
    return "".join(_TICKS[min(int(value / most * 8), 7)] for value in values)


def _latency(found: Mapping[str, float] | None) -> tuple[str, str]:
    if found is None:
        return _NONE, ""
    return duration(found["p50_s"]), f"p99 {duration(found['p99_s'])}"


def percent(share: float | None) -> str:
    """A share in per cent."""
    return _NONE if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """A time in the most readable unit."""
    if seconds is None:
        return _NONE
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def size(num_bytes: float) -> str:
    """Bytes in decimal units, like the rates of hardware."""
    for unit in _UNITS:
        if num_bytes < 999.5 or unit == _UNITS[-1]:
            break
        num_bytes /= 1000
    return (
        f"{num_bytes:.0f} {unit}"
        if unit == "B" or num_bytes >= 100
        else f"{num_bytes:.1f} {unit}"
    )
