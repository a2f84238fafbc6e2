"""A report as lines for people."""

from collections.abc import Mapping, Sequence

from headwater.replay.report import Report

_SHARED = ("p50", "p90", "p99", "mean", "max")


def report_table(report: Report) -> str:
    """What matters of `report`, and where it comes from."""
    settings = report["settings"]
    lines = [
        (
            f"headwater replay: {report['requests']:,} requests on {_cluster(settings)} x "
            f"{settings['machine']}, {_tiers(settings)}"
        ),
        "",
        (
            f"  found            {_percent(report['token_hit'])} of "
            f"{report['prompt_tokens']:,} prompt tokens, {_percent(report['block_hit'])} of blocks"
        ),
    ]
    lines += _counts("tokens from", report["tokens_by_source"])
    lines += _counts("missed because", report["misses_by_reason"], "requests")
    lines += ["", f"  {'ms':<20}" + "".join(f"{name:>11}" for name in _SHARED)]
    for name in ("ttft", "itl", "e2e"):
        values = report[f"{name}_ms"]
        lines.append(f"  {name:<20}" + "".join(f"{values[one]:>11,.1f}" for one in _SHARED))
    lines += [
        "",
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
    for link, moved in report["bytes_per_link"].items():
        busy = _percent(report["busy_share_per_link"][link])
        lines.append(f"  {link:<16} {moved / 1e9:,.2f} GB, busy {busy}")
    if report["queue"]["overloaded"]:
        lines += [
            "",
            (
                "  overloaded: the queue only grew, so latencies depend on the length of the trace. Give "
                "more instances, or slow the trace down"
            ),
        ]
    if "slo" in report:
        lines += ["", *_slo(report["slo"])]
    return "\n".join([*lines, "", f"  simulated in {report['wall_s']:.1f} s", ""])


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
        "requests kept every bound"
    )
    return lines


def _cluster(settings: Mapping[str, int]) -> str:
    prefill = settings["prefill_instances"]
    total = settings["instances"]
    return f"({prefill} prefill + {total - prefill} decode)" if prefill else str(total)


def _tiers(settings: Mapping[str, float]) -> str:
    parts = [
        f"{name} {settings[f'{name}_gib']:,.0f} GiB"
        for name in ("device", "host", "storage")
        if settings[f"{name}_gib"]
    ]
    return ", ".join(parts)


def _counts(title: str, counts: Mapping[str, int], unit: str = "") -> list[str]:
    rows: Sequence[tuple[str, int]] = [(k, v) for k, v in counts.items() if v]
    lines = []
    for at, (name, count) in enumerate(rows):
        head = title if at == 0 else ""
        lines.append(f"  {head:<16} {name:<20} {count:>14,} {unit}".rstrip())
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
