"""A real Prometheus over a live server: metrics, the dashboard's queries and the rules."""

import json
import os
import shutil
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.live import LiveServer
from tests.e2e.prometheus import Prometheus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="needs prometheus (Debian: apt-get install prometheus)",
    ),
]

BOARD = Path(__file__).parents[2] / "deploy/grafana/headwater.json"
SHOWN_AT_ONCE = (
    "engine_up",
    "generation_tokens",
    "prompt_tokens_total",
    "time_to_first_token",
    "inter_token_latency",
    "prefix_cache_hits",
    "tier_blocks",
    "engine_steps",
    "e2e_request_latency",
)
"""Panels that show data for any server with some traffic; the others need tiers, peers and
routers."""


@pytest.fixture
def watched(tmp_path):
    server = LiveServer("--max-model-len", "4096").wait_ready()
    prometheus = Prometheus(tmp_path, urlsplit(server.url).netloc)
    yield server, prometheus
    prometheus.stop()
    server.stop()


def queries():
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")


def test_prometheus_reads_the_metrics_and_runs_every_query_and_rule(watched):
    """Panels of a server with traffic have data, no query is an error, and a killed engine
    raises an alert."""
    server, prometheus = watched
    prometheus.await_any("headwater:engine_up == 1")
    for number in range(3):
        server.complete(prompt=f"A river begins. {number}", max_tokens=8).raise_for_status()
    prometheus.await_any("rate(headwater:time_to_first_token_seconds_count[1m]) > 0")

    shown = {query: prometheus.query(query) for query in queries()}
    for name in SHOWN_AT_ONCE:
        mine = [result for query, result in shown.items() if f"headwater:{name}" in query]
        assert mine, name
        for result in mine:
            assert result, name
            assert all(sample["value"][1] != "NaN" for sample in result), name

    os.kill(server.engine_pid, signal.SIGKILL)
    prometheus.await_any('ALERTS{alertname="HeadwaterEngineDown", alertstate="pending"}')
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
