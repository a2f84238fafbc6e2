"""The scrape, parsed as Prometheus does; and everything that names a metric."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headwater.metrics import names, router_names
from headwater.metrics.page import page
from headwater.metrics.prometheus import render
from headwater.metrics.recorder import Recorder
from headwater.metrics.stats import EngineStats, LinkStats, TierStats

ROOT = Path(__file__).parents[2]


def make_stats():
    tier = TierStats(num_blocks=10, free=2, held=3, cached=5, evictable=4, evicted=7)
    link = LinkStats(num_jobs=3, num_bytes=4096, busy_s=0.5, fastest_bytes_s=9e9)
    return EngineStats(
        tiers={"device": tier, "host": tier},
        links={"host_to_device": link},
        misses={"never_seen": 2, 'odd "reason"\n': 1},
        load_choices={"split": 4},
    )


def make_recorder():
    recorder = Recorder()
    recorder.count(names.PROMPT_TOKENS_BY_SOURCE, 5, "host")
    recorder.count(names.SUCCESS, label="stop")
    recorder.observe(names.TTFT, 0.2)
    recorder.observe(names.ITL, 0.02, times=9)
    return recorder


def test_a_real_parser_reads_every_metric_with_its_kind():
    """Names, kinds, labels and help are those of the table."""
    text = render(make_recorder(), make_stats(), block_tokens=64).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}

    for metric in names.ALL:
        family = families[f"{names.PREFIX}:{metric.name.removesuffix('_total')}"]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    ttft = families["headwater:time_to_first_token_seconds"]
    buckets = [s.value for s in ttft.samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 1
    misses = families["headwater:prefix_cache_misses"].samples
    assert {sample.labels["reason"] for sample in misses} == {"never_seen", 'odd "reason"\n'}


def test_counters_never_go_down():
    """Lesson 62: a second scrape, after more was recorded, has no smaller counter."""
    recorder = make_recorder()
    before: dict[tuple[str, ...], float] = {}
    for _ in range(2):
        body = render(recorder, make_stats(), block_tokens=64)
        now = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
            if family.type != "gauge"
        }
        assert all(now[name] >= value for name, value in before.items())
        before = now
        recorder.count(names.SUCCESS, label="stop")
        recorder.observe(names.TTFT, 100.0)


def test_without_an_engine_the_scrape_says_so():
    """A dead engine gives a gauge of 0, not a failed scrape."""
    body = render(make_recorder(), None, block_tokens=64)

    assert "headwater:engine_up 0.0" in body.decode()
    assert "headwater:num_requests_running" not in body.decode()


def test_the_page_is_written_from_the_table():
    """docs/metrics.md is what `python -m headwater.metrics.page` prints."""
    assert (ROOT / "docs" / "metrics.md").read_text() == page()


def exposed() -> set[str]:
    """Every sample name, as a query may use it."""
    found = set()
    for metric in (*names.ALL, *router_names.ROUTER_METRICS):
        ends = ("_bucket", "_sum", "_count") if metric.kind is names.Kind.HISTOGRAM else ("",)
        found |= {f"{names.PREFIX}:{metric.name}{end}" for end in ends}
    return found


@pytest.mark.parametrize(
    "path", ["deploy/grafana/headwater.json", "deploy/prometheus/alerts.yml"]
)
def test_dashboard_and_alerts_name_only_metrics_that_exist(path):
    """A query for a metric that does not exist shows nothing, for ever."""
    named = set(re.findall(r"headwater:[a-z0-9_]+", (ROOT / path).read_text()))

    assert named
    assert named <= exposed()


def test_dashboard_and_alerts_are_whole():
    """Grafana can import the dashboard, and Prometheus can load the rules."""
    board = json.loads((ROOT / "deploy/grafana/headwater.json").read_text())
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())

    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 12
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])
    for rule in rules["groups"][0]["rules"]:
        assert {"alert", "expr", "for", "labels", "annotations"} <= set(rule)
