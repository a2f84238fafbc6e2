"""docs/metrics.md, written from the table in `names`: `python -m headwater.metrics.page`."""

import sys
from collections.abc import Iterable

from headwater.metrics import names, router_names
from headwater.metrics.names import Metric

_HEAD = """\
# Metrics

`GET /metrics` answers in the Prometheus text format.
`python -m headwater.metrics.page` generates this page from the table in the code, and a test
checks that they agree.

- Counters never decrease while the engine runs; those of the engine start at 0 again when it is
  restarted. Compute ratios in the query, over any window:
  `rate(headwater:prefix_cache_hits_total[5m]) / rate(headwater:prefix_cache_queries_total[5m])`.
- The engine counts its decisions, and the HTTP workers count its outputs. A scrape reads these
  counts; nothing is sampled. `headwater bench metrics` measures the cost.
- Reasons and tiers are labels. No label contains a request id, a salt or a prompt.
- `deploy/prometheus/alerts.yml` has alert rules, `deploy/grafana/headwater.json` a dashboard.
  [`/dashboard`](operations.md#watching) needs neither.
"""

_ROUTERS = """\
## Under the `vllm:` prefix

With `--vllm-metric-names` these metrics are also exposed as `vllm:…`, for routers and autoscalers
that read those names: {listed}.
"""


def page() -> str:
    """The whole page."""
    routers = ", ".join(f"`{metric.name}`" for metric in names.SCRAPED_BY_ROUTERS)
    parts = [
        _HEAD,
        _section(
            "The engine",
            (names.ENGINE_UP, names.VIOLATIONS, names.ENGINE_RESTARTS, *names.ENGINE_METRICS),
        ),
        _section("The server", names.SERVER_METRICS),
        _section("The router", router_names.ROUTER_METRICS),
        _ROUTERS.format(listed=routers),
    ]
    return "\n".join(parts)


def _section(title: str, metrics: Iterable[Metric]) -> str:
    rows = [f"## {title}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
    rows += [_row(metric) for metric in metrics]
    return "\n".join(rows) + "\n"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    name = f"`{names.PREFIX}:{metric.name}`"
    return f"| {name} | {metric.kind.value} | {labels} | {metric.help} |"


if __name__ == "__main__":
    sys.stdout.write(page())
