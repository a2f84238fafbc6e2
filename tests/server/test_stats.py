"""GET /stats, /cache/tree and the files of the page, over an echo engine."""

import asyncio
import re

import pytest

from headwater.server.sampler import HistorySampler
from tests.server.harness import error, run


def test_stats_has_what_cache_has_and_what_the_server_counted():
    """One answer has everything for the dashboard: counters, latencies, tiers, and finished
    requests."""

    async def scenario(harness):
        await harness.complete(prompt="x" * 100, max_tokens=8)
        await harness.complete(prompt="x" * 100, max_tokens=8, request_id="second")
        body = (await harness.client.get("/stats")).json()
        assert body["cache"] == (await harness.client.get("/cache")).json()
        assert body["totals"]["generation_tokens_total"] == 16
        sources = body["totals"]["prompt_tokens_by_source_total"]
        assert (sources["computed"], sources["device"], sources["host"]) == (104, 96, 0)
        assert sum(body["latencies"]["ttft"]["counts"]) == 2
        assert body["sequences"] == []
        last, first = body["recent"]
        assert last["request_id"].startswith("second-")
        assert (last["tokens_by_source"]["device"], last["cached_tokens"]) == (96, 96)
        assert (first["miss_reason"], first["output_tokens"]) == ("never_seen", 8)

    run(scenario)


def test_history_has_a_point_for_each_interval_between_samples():
    """A point has the rates of the interval with the reasons of computed tokens; `after`
    selects new points."""

    async def scenario(harness):
        sampler = HistorySampler(harness.service)
        await sampler.sample()
        assert (await harness.client.get("/stats/history")).json()["points"] == []
        await harness.complete(prompt="x" * 100, max_tokens=8)
        await sampler.sample()
        body = (await harness.client.get("/stats/history")).json()
        (point,) = body["points"]
        rates = point["rates"]
        assert rates["output_tokens"] * point["elapsed_s"] == pytest.approx(8)
        assert rates["computed_by_reason"]["never_seen"] * point["elapsed_s"] == pytest.approx(
            100
        )
        assert (body["span_s"], body["now_unix_s"] >= point["unix_s"]) == (600.0, True)
        newer = await harness.client.get(f"/stats/history?after={point['unix_s']}")
        assert newer.json()["points"] == []
        assert (await harness.client.get("/stats/history?after=x")).status_code == 400

    run(scenario)


def test_stats_shows_progress_and_what_a_request_waits_for():
    """/stats shows a running sequence with its tokens, and one that waits for room."""

    async def scenario(harness):
        harness.engine.hold()
        tasks = [
            asyncio.create_task(harness.complete(prompt="x" * 40, max_tokens=9))
            for _ in range(9)
        ]
        await harness.until_waiting(9)
        harness.engine.core.step()
        found = (await harness.client.get("/stats")).json()["sequences"]
        states = [sequence["state"] for sequence in found]
        assert states.count("waiting") == len([s for s in found if s["waits_for"]]) > 0
        running = next(s for s in found if s["state"] != "waiting")
        assert (running["prompt_tokens"], running["max_output_tokens"]) == (40, 9)
        assert running["computed_tokens"] > 0
        harness.engine.flow()
        await asyncio.gather(*tasks)

    run(scenario)


def test_the_tree_shows_shapes_and_of_salted_tenants_a_sum():
    """Lesson 67: the tree has sizes only; no token, no salt, no text."""

    async def scenario(harness):
        await harness.complete(prompt="a" * 64, max_tokens=1)
        await harness.complete(prompt="secret words " * 8, max_tokens=1, cache_salt="tenant")
        response = await harness.client.get("/cache/tree")
        body = response.json()
        assert [node["num_blocks"] for node in body["nodes"]] == [4]
        assert body["apart"]["num_namespaces"] == 1
        assert body["apart"]["device"] == 6
        for secret in ("secret", "tenant", "tokens", "keys"):
            assert secret not in response.text

    run(scenario)


@pytest.mark.parametrize(
    "query", ["depth=0", "limit=0", "limit=4097", "depth=x", "limit=-1", "depth=9999999999"]
)
def test_the_tree_is_bounded(query):
    """A large tree is never returned completely."""

    async def scenario(harness):
        answer = await harness.client.get(f"/cache/tree?{query}")
        assert error(answer, 400)["param"] == query.partition("=")[0]

    run(scenario)


def test_the_page_and_its_parts_need_no_key_and_load_nothing_from_elsewhere():
    """The page consists of static files with a policy that allows only this server."""

    async def scenario(harness):
        page = await harness.client.get("/dashboard")
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        parts = re.findall(r'(?:href|src)="(dashboard/[^"]+)"', page.text)
        assert len(set(parts)) >= 3
        for part in parts:
            answer = await harness.client.get("/" + part)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"https?://(?!www\.w3\.org)", answer.text)
        for path in ("/stats", "/cache/tree"):
            assert (await harness.client.get(path)).status_code == 401
        assert (await harness.client.get("/dashboard/other.js")).status_code == 404
        assert (await harness.client.get("/dashboard/%2e%2e/admin.py")).status_code in (
            401,
            404,
        )

    run(scenario, api_key="hidden")
