"""A report as lines of text."""

from collections.abc import Mapping, Sequence

from headwater.replay.report import Report, size_text

_SHARED = ("p50", "p90", "p99", "mean", "max")

_OVERLOADED = (
    "  OVERLOADED: the queue kept growing while requests arrived, so latencies depend on the "
    "length of the trace.\n"
    "  Give more instances (--instances), or slow the trace down (a lower --speed)."
)


def report_table(report: Report) -> str:
    """The important figures of `report`, and their causes."""
    settings = report["settings"]
    lines = [
        (
            f"headwater replay: {report['requests']:,} requests on {_cluster(settings)} x "
            f"{settings['machine']}, {_tiers(settings)}"
        ),
        (
            f"  eviction {settings['eviction']}, write policy {settings['write_policy']}, "
            f"load policy {settings['load_policy']}"
        ),
        "",
        *_found(report),
        "",
        f"  {'ms':<16}" + "".join(f"{name:>12}" for name in _SHARED),
    ]
    for name, label in (
        ("ttft", "first token"),
        ("itl", "between tokens"),
        ("e2e", "request"),
    ):
        values = report[f"{name}_ms"]
        lines.append(f"  {label:<16}" + "".join(f"{values[one]:>12,.1f}" for one in _SHARED))
    lines += ["", *_rates(report), *_link_rows(report)]
    if report["queue"]["overloaded"]:
        lines += ["", _OVERLOADED]
    if "slo" in report:
        lines += ["", *_slo(report["slo"])]
    return "\n".join([*lines, "", f"  simulated in {report['wall_s']:.1f} s", ""])


def _found(report: Report) -> list[str]:
    prompt = max(report["prompt_tokens"], 1)
    lines = [
        (
            f"  found            {_percent(report['token_hit'])} of "
            f"{report['prompt_tokens']:,} prompt tokens; a cache without a size limit could find "
            f"{_percent(report['token_hit_ceiling'])}"
        )
    ]
    lines += _counts("tokens from", report["tokens_by_source"], prompt)
    lines += _counts("missed because", report["missed_tokens_by_reason"], prompt)
    return lines


def _rates(report: Report) -> list[str]:
    lines = [
        (
            f"  throughput       {report['throughput']:,.1f} output tokens/s, "
            f"{report['prompt_tokens_per_s']:,.0f} prompt tokens/s, "
            f"{report['requests_per_s']:.2f} requests/s over {report['duration_s']:,.0f} s"
        ),
        (
            f"  queue            {report['queue']['mean_waiting']:.1f} waiting on average, "
            f"{report['queue']['max_waiting']:,.0f} at most; {report['preemptions']:,} preemptions"
        ),
    ]
    if "handoffs" in report:
        handoffs = report["handoffs"]
        lines.append(
            f"  hand-offs        {handoffs['done']:,} done, {handoffs['bytes'] / 1e9:,.2f} GB; "
            f"not done: {handoffs['failures'] or 'none'}"
        )
    if report["refused"]:
        lines.append(f"  refused          {report['refused']:,} requests that do not fit")
    return lines


def _link_rows(report: Report) -> list[str]:
    if not report["bytes_per_link"]:
        return []
    lines = ["", f"  {'link':<16}{'GB':>12}{'busy':>12}"]
    for link, moved in report["bytes_per_link"].items():
        busy = _percent(report["busy_share_per_link"][link])
        lines.append(f"  {link:<16}{moved / 1e9:>12,.2f}{busy:>12}")
    return lines


def _slo(slo: Report) -> list[str]:
    lines = []
    for name, bound in slo["bounds"].items():
        verdict = "met" if bound["met"] else "NOT met"
        lines.append(
            f"  {name:<16} {bound['actual_ms']:,.1f} ms, at most {bound['limit_ms']:,.1f}: "
            f"{verdict}"
        )
    lines.append(
        f"  goodput          {slo['goodput_requests_per_s']:.2f} requests/s, "
        f"{slo['goodput_tokens_per_s']:,.1f} output tokens/s; {_percent(slo['good_share'])} of "
        "requests were within every bound"
    )
    return lines


def _cluster(settings: Mapping[str, int]) -> str:
    prefill = settings["prefill_instances"]
    total = settings["instances"]
    return f"({prefill} prefill + {total - prefill} decode)" if prefill else str(total)


def _tiers(settings: Mapping[str, float]) -> str:
    parts = [
        f"{name} {size_text(settings[f'{name}_gib'])} GiB"
        for name in ("device", "host", "storage")
        if settings[f"{name}_gib"]
    ]
    return ", ".join(parts)


def _counts(title: str, counts: Mapping[str, int], prompt: int) -> list[str]:
    """Rows of tokens with their share of all prompt tokens."""
    rows: Sequence[tuple[str, int]] = [(k, v) for k, v in counts.items() if v]
    lines = []
    for at, (name, count) in enumerate(rows):
        head = title if at == 0 else ""
        lines.append(f"  {head:<16} {name:<20}{count:>16,}{_percent(count / prompt):>10}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
