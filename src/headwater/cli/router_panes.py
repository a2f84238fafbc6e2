"""What `headwater top` draws for a router: one row for each instance."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwater.cli.panes import duration, percent
from headwater.metrics.rates import ServerRates

_STATES = {"ready": "green", "draining": "yellow", "lost": "red"}


def router_screen(
    answer: Mapping[str, Any], rates: Mapping[str, ServerRates | None], url: str, state: str
) -> RenderableType:
    """The whole view. `rates` has an entry for each instance that could be asked directly."""
    instances = answer["instances"]
    ready = sum(entry["state"] == "ready" for entry in instances)
    head = Text.assemble(
        ("headwater router ", "bold"),
        f"at {url}, policy {answer['policy']}, {ready} of {len(instances)} instances ready  ",
        ("●" if state == "live" else "◆", "green" if state == "live" else "red"),
        f" {state}",
    )
    return Group(head, _totals(instances, rates), _instances(instances, rates))


def _totals(instances: list[dict[str, Any]], rates: Mapping[str, ServerRates | None]) -> Text:
    known = [found for found in rates.values() if found is not None]
    prompt = sum(sum(found.by_source.values()) for found in known)
    computed = sum(found.by_source["computed"] for found in known)
    return Text(
        f"output {sum(found.output_tokens for found in known):,.0f} tokens/s"
        f"   prompts {prompt:,.0f} tokens/s"
        f"   found {percent(1 - computed / prompt if prompt else None)}"
        f"   in flight {sum(entry['num_alive'] for entry in instances):,}"
    )


def _instances(
    instances: list[dict[str, Any]], rates: Mapping[str, ServerRates | None]
) -> RenderableType:
    if not instances:
        return Text("no instance; start one with headwater serve --router URL", "dim")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("instance", "role", "state"):
        table.add_column(name, no_wrap=name != "instance", overflow="ellipsis")
    for name in ("running", "waiting", "tokens/s", "found", "first token", "blocks", "seen"):
        table.add_column(name, no_wrap=True, justify="right")
    for entry in instances:
        found = rates.get(entry["instance_id"])
        table.add_row(
            Text(entry["instance_id"], no_wrap=True, overflow="ellipsis"),
            entry["role"],
            Text(entry["state"], _STATES.get(entry["state"], "")),
            f"{entry['load']['running']:,}",
            f"{entry['load']['waiting']:,}",
            "-" if found is None else f"{found.output_tokens:,.0f}",
            percent(None if found is None else found.hit_share),
            duration(None if found is None or found.ttft is None else found.ttft.p50_s),
            f"{entry['known_blocks']:,}",
            f"{duration(entry['seen_s_ago'])} ago",
        )
    return table
