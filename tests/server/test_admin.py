"""Health, models, metrics, cache control, tokenizer endpoints, the key."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.metrics import names
from headwater.server.app import ROUTES
from headwater.server.openapi import document
from tests.server.harness import error, run


def samples(text):
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_health_is_cheap_and_the_deep_check_is_separate():
    """Lesson 69: /health never runs the model; /health_generate does, and fails with it."""

    async def scenario(harness):
        assert (await harness.client.get("/health")).json() == {"status": "ok"}
        assert harness.engine.core.stats().num_steps == 0
        assert (await harness.client.get("/health_generate")).json() == {"status": "ok"}
        assert harness.engine.core.stats().num_steps > 0
        harness.engine.die("gone")
        error(await harness.client.get("/health_generate"), 503)

    run(scenario)


def test_health_answers_while_the_engine_is_busy():
    """Lesson 69: an engine in a long step is alive, and /health answers without asking it."""

    async def scenario(harness):
        harness.engine.hold()
        waiting = asyncio.create_task(harness.complete())
        await harness.until_live(1)
        assert (await harness.client.get("/health")).status_code == 200
        harness.engine.flow()
        await waiting

    run(scenario)


def test_models_says_what_is_served_and_how_long_it_may_be():
    """The list has the name for clients, and `max_model_len`."""

    async def scenario(harness):
        card = (await harness.client.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("spring", 512)
        assert (await harness.client.get("/v1/models/spring")).json() == card
        error(await harness.client.get("/v1/models/other"), 404)
        assert (await harness.complete(model="spring")).json()["model"] == "spring"

    run(scenario, served_model_name="spring")


def test_metrics_are_counters_that_only_go_up():
    """Lesson 62: tokens looked up, found and computed are counted; the reader computes
    ratios."""

    async def scenario(harness):
        prompt = "x" * 100
        for _ in range(2):
            await harness.complete(prompt=prompt, max_tokens=4)
        found = samples((await harness.client.get("/metrics")).text)
        prefix = names.PREFIX
        assert found[f"{prefix}:prompt_tokens_total",] == 200
        assert found[f"{prefix}:prompt_tokens_by_source_total", "device"] == 96
        assert found[f"{prefix}:prompt_tokens_by_source_total", "computed"] == 104
        assert found[f"{prefix}:prefix_cache_queries_total",] == 200
        assert found[f"{prefix}:prefix_cache_hits_total",] == 96
        assert found[f"{prefix}:generation_tokens_total",] == 8
        assert found[f"{prefix}:request_success_total", "length"] == 2
        assert found[f"{prefix}:time_to_first_token_seconds_count",] == 2
        assert found[f"{prefix}:inter_token_latency_seconds_count",] == 6
        assert found[f"{prefix}:e2e_request_latency_seconds_count",] == 2
        assert found[f"{prefix}:request_queue_time_seconds_count",] == 2
        assert found[f"{prefix}:num_requests_running",] == 0
        assert found[f"{prefix}:kv_cache_usage_perc",] == 0
        assert found[f"{prefix}:cache_config_info", "0", "16", "64"] == 1
        assert found[f"{prefix}:tier_blocks", "device", "held"] == 0
        assert not any(name.startswith("vllm:") for name, *_ in found)

    run(scenario)


def test_router_metrics_can_be_had_under_the_vllm_prefix():
    """The prefix is an option, for routers that scrape those names."""

    async def scenario(harness):
        found = samples((await harness.client.get("/metrics")).text)
        for metric in names.SCRAPED_BY_ROUTERS:
            assert any(name == f"vllm:{metric.name}" for name, *_ in found)

    run(scenario, vllm_metric_names=True)


def test_every_metric_is_exposed_once_under_its_name():
    """The scrape has the metrics of names.py and no others."""

    async def scenario(harness):
        await harness.complete(prompt="y")
        text = (await harness.client.get("/metrics")).text
        shown = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert sorted(shown) == sorted(f"{names.PREFIX}:{metric.name}" for metric in names.ALL)

    run(scenario)


def test_cache_shows_tiers_ledger_and_the_shortest_prefix_that_can_hit():
    """Lesson 65: zero hits always have an explanation."""

    async def scenario(harness):
        await harness.complete(prompt="short")
        await harness.complete(prompt="x" * 100)
        body = (await harness.client.get("/cache")).json()
        assert body["block_tokens"] == 16
        assert body["min_prefix_tokens"] == 16
        device = body["tiers"]["device"]
        assert device["free"] + device["held"] + device["cached"] == device["num_blocks"] == 64
        assert body["ledger"]["queries"] == 2
        assert body["ledger"]["misses"] == {"too_short": 1, "never_seen": 1}

    run(scenario)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_reset_forgets_what_was_cached(path):
    """Both spellings work; the next request computes everything again."""

    async def scenario(harness):
        prompt = "x" * 100
        await harness.complete(prompt=prompt)
        done = (await harness.post(path)).json()
        assert done["status"] == "done"
        assert done["removed"]["device"] > 0
        usage = (await harness.complete(prompt=prompt)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    run(scenario)


def test_a_reset_names_tiers_or_is_refused():
    """Lesson 59: a reset that is not possible is refused with the reason."""

    async def scenario(harness):
        prompt = "x" * 100
        await harness.complete(prompt=prompt)
        await harness.until_idle()
        alone = await harness.post("/reset_prefix_cache", {"tiers": ["storage"]})
        assert "together with device and host" in error(alone, 400)["message"]
        nowhere = await harness.post(
            "/reset_prefix_cache", {"tiers": ["device", "host", "storage"]}
        )
        assert "no storage tier" in error(nowhere, 400)["message"]
        assert error(await harness.post("/flush_cache", {"tiers": ["attic"]}), 400)
        assert error(await harness.post("/flush_cache", {"tiers": []}), 400)
        done = (await harness.post("/reset_prefix_cache", {"tiers": ["device"]})).json()
        assert done == {"status": "done", "removed": {"device": 7}, "kept": {"device": 0}}

    run(scenario)


def test_control_endpoints_refuse_unknown_fields_and_list_the_valid_ones():
    """A misspelt `tiers` must not reset every tier in memory."""

    async def scenario(harness):
        prompt = "x" * 100
        await harness.complete(prompt=prompt)
        await harness.until_idle()

        misspelt = error(await harness.post("/reset_prefix_cache", {"tier": "device"}), 400)
        wrong = error(await harness.post("/flush_cache", {"tiers": ["attic"]}), 400)
        no_fields = error(await harness.post("/v1/pause", {"now": True}), 400)

        assert misspelt["param"] == "tier"
        assert "valid fields: tiers (device | host | storage)" in misspelt["message"]
        assert wrong["param"] == "tiers"
        assert "device | host | storage" in wrong["message"]
        assert "takes no fields" in no_fields["message"]
        usage = (await harness.complete(prompt=prompt)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0

    run(scenario)


def test_reset_works_under_load():
    """Lesson 59: running requests keep their blocks and end with the right tokens."""

    async def scenario(harness):
        fields = {"prompt": "x" * 60, "max_tokens": 60, "return_token_ids": True, "seed": 1}
        alone = (await harness.complete(**fields)).json()["choices"][0]["token_ids"]
        running = [asyncio.create_task(harness.complete(**fields)) for _ in range(4)]
        for _ in range(12):
            await asyncio.sleep(0)
            await harness.post("/reset_prefix_cache")
        for task in running:
            assert (await task).json()["choices"][0]["token_ids"] == alone
        assert await harness.all_free()

    run(scenario)


def test_pause_holds_new_requests_until_resume():
    """Lesson 58: during a pause requests wait, and are served after resume."""

    async def scenario(harness):
        await harness.post("/v1/pause")
        waiting = asyncio.create_task(harness.complete())
        await harness.until_waiting(1)
        assert (await harness.client.get("/cache")).json()["is_paused"]
        assert not waiting.done()
        await harness.post("/v1/resume")
        assert (await waiting).status_code == 200

    run(scenario)


def test_abort_all_ends_everything():
    """Every request of every client ends; an empty selection is a 400."""

    async def scenario(harness):
        harness.engine.hold()
        waiting = [asyncio.create_task(harness.complete()) for _ in range(3)]
        await harness.until_waiting(3)
        assert (await harness.post("/v1/abort_requests", {"abort_all": True})).json() == {
            "aborted": 3
        }
        assert [(await task).status_code for task in waiting] == [499] * 3
        harness.engine.flow()
        error(await harness.post("/v1/abort_requests", {}), 400)

    run(scenario)


def test_tokenize_and_detokenize_undo_each_other():
    """A text, or a conversation through the template, becomes ids, and ids become text
    again."""

    async def scenario(harness):
        body = (
            await harness.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
        ).json()
        assert body["count"] == 6
        assert len(body["token_strs"]) == 6
        text = (await harness.post("/detokenize", {"tokens": body["tokens"]})).json()["prompt"]
        assert text == "héllo"
        messages = [{"role": "user", "content": "hi"}]
        assert (await harness.post("/tokenize", {"messages": messages})).json()["count"] == 5
        error(await harness.post("/tokenize", {}), 400)
        error(await harness.post("/detokenize", {"tokens": [-1]}), 400)
        error(await harness.post("/tokenize", {"prompt": "a", "model": "other"}), 404)

    run(scenario)


def test_server_info_hides_the_key():
    """/server_info shows the settings, so that a benchmark can record them, and never a
    secret."""

    async def scenario(harness):
        headers = {"authorization": "Bearer hidden"}
        response = await harness.client.get("/server_info", headers=headers)
        assert response.json()["engine"]["block_tokens"] == 16
        assert response.json()["server"]["api_key"] is True
        assert response.json()["server"]["peer_token"] is True
        assert "hidden" not in response.text

    run(scenario, api_key="hidden", peer_token="hidden-too")


@pytest.mark.parametrize(
    "header", [None, "", "hidden", "Bearer", "Bearer hidde", "Basic hidden"]
)
def test_without_the_key_only_health_answers(header):
    """All other paths answer 401 with an error object; the right key opens everything."""

    async def scenario(harness):
        headers = {} if header is None else {"authorization": header}
        response = await harness.client.get("/v1/models", headers=headers)
        assert error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert (await harness.client.get("/health", headers=headers)).status_code == 200
        good = {"authorization": "Bearer hidden"}
        assert (await harness.client.get("/v1/models", headers=good)).status_code == 200

    run(scenario, api_key="hidden")


def test_a_draining_server_refuses_new_work_and_still_answers_reads():
    """Health checks and new requests get 503 with `Retry-After`; metrics and aborts still
    work."""

    async def scenario(harness):
        harness.engine.hold()
        running = asyncio.create_task(harness.complete(max_tokens=4))
        await harness.until_live(1)
        harness.readiness.drain()

        health = await harness.client.get("/health")
        refused = await harness.complete()

        assert error(health, 503)["message"].startswith("draining")
        assert error(refused, 503)["code"] == "draining"
        for response in (health, refused):
            assert response.headers["retry-after"] == "1"
            assert response.headers["connection"] == "close"
        assert (await harness.client.get("/metrics")).status_code == 200
        nothing = await harness.post("/v1/abort_requests", {"request_ids": ["none"]})
        assert nothing.json() == {"aborted": 0}
        assert not await harness.readiness.wait_idle(0.01)

        harness.engine.flow()
        assert (await running).status_code == 200
        assert await harness.readiness.wait_idle(10.0)

    run(scenario)


def test_unknown_paths_and_methods_have_error_objects():
    """404 and 405 look like every other error."""

    async def scenario(harness):
        error(await harness.client.get("/nothing"), 404)
        response = await harness.client.get("/v1/completions")
        error(response, 405)
        assert response.headers["allow"] == "POST"

    run(scenario)


def test_the_openapi_document_has_every_route():
    """What is served is documented, path by path and method by method."""
    paths = document()["paths"]
    for route in ROUTES:
        if route.path != "/openapi.json":
            path = route.path.replace(":path}", "}")
            assert {m.lower() for m in route.methods or () if m != "HEAD"} == set(paths[path])

    async def scenario(harness):
        body = (await harness.client.get("/openapi.json")).json()
        assert body["openapi"] == "3.1.0"

    run(scenario)
