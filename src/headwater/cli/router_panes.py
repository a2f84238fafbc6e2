"""What `headwater top` draws for a router: one row for each instance."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.cli.panes import duration, percent

_WIDE = 130
"""Columns from which everything is shown."""
_NARROW = ("run", "wait", "tokens/s", "found", "first p99", "seen ago")
_COLUMNS = (
    *(
        "run",
        "wait",
        "tokens/s",
        "found",
        "first p50",
        "first p99",
        "between p50",
        "between p99",
    ),
    *("blocks", "seen ago"),
)
_STATES = {"ready": "green", "draining": "yellow", "lost": "red"}


def router_screen(answer: Mapping[str, Any], url: str, state: str) -> RenderableType:
    """The whole view of one answer of GET /instances."""
    instances = sorted(answer["instances"], key=lambda entry: str(entry["instance_id"]))
    lost = answer["lost"]
    ready = sum(entry["state"] == "ready" for entry in instances)
    head = Text.assemble(
        ("headwater router ", "bold"),
        f"at {url}  ",
        ("●" if state == "live" else "◆", "green" if state == "live" else "red"),
        f" {state}\n",
        f"{ready} of {len(instances) + len(lost)} instances ready, policy {answer['policy']}",
    )
    if not instances and not lost:
        hint = Text("no instance; start one with headwater serve --router URL", "dim")
        return Group(head, hint)
    return Group(head, _totals(instances), _Instances(instances, lost))


def _totals(instances: list[dict[str, Any]]) -> Text:
    reports = [entry["report"] for entry in instances if entry["state"] != "lost"]
    known = [report for report in reports if report["hit_share"] is not None]
    prompts = sum(report["prompt_tokens_s"] for report in known)
    found = sum(report["hit_share"] * report["prompt_tokens_s"] for report in known)
    return Text(
        f"last minute: {sum(report['output_tokens_s'] for report in reports):,.1f} tokens/s,"
        f" {sum(report['prompt_tokens_s'] for report in reports):,.1f} prompt tokens/s,"
        f" {percent(found / prompts if prompts else None)} found;"
        f" {sum(entry['num_alive'] for entry in instances):,} in flight"
    )


class _Instances:
    """A table with a row for each instance. A narrow terminal has fewer columns, so that names
    stay whole."""

    def __init__(self, instances: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
        self._instances = instances
        self._lost = lost

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        columns = _COLUMNS if options.max_width >= _WIDE else _NARROW
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("instance", "role", "state"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for name in columns:
            table.add_column(name, no_wrap=True, justify="right")
        for entry in self._instances:
            cells = _cells(entry)
            table.add_row(*_names(entry, entry["state"]), *(cells[name] for name in columns))
        for entry in self._lost:
            absent = dict.fromkeys(columns, "-") | {"seen ago": _seen(entry)}
            table.add_row(*_names(entry, "lost"), *(absent[name] for name in columns))
        yield table


def _names(entry: Mapping[str, Any], state: str) -> tuple[str, str, Text]:
    return entry["instance_id"], entry["role"], Text(state, _STATES.get(state, ""))


def _cells(entry: Mapping[str, Any]) -> dict[str, str]:
    """The cells of one row. The last report of a lost instance is old, so it is not shown."""
    report, load = entry["report"], entry["load"]
    seen = {"blocks": f"{entry['known_blocks']:,}", "seen ago": _seen(entry)}
    if entry["state"] == "lost":
        return dict.fromkeys(_COLUMNS, "-") | seen
    return seen | {
        "run": f"{load['running']:,}",
        "wait": f"{load['waiting']:,}",
        "tokens/s": f"{report['output_tokens_s']:,.1f}",
        "found": percent(report["hit_share"]),
        "first p50": duration(report["ttft_p50_s"]),
        "first p99": duration(report["ttft_p99_s"]),
        "between p50": duration(report["itl_p50_s"]),
        "between p99": duration(report["itl_p99_s"]),
    }


def _seen(entry: Mapping[str, Any]) -> str:
    return duration(entry["seen_s_ago"])
