"""The router over real sockets: which instance gets a request, and why."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse

from headwater.engine.client import ResetCache
from headwater.errors import ConfigError
from headwater.server.app import create_app
from headwater.server.registration import Registrar
from headwater.server.router.protocol import TOKEN_HEADER
from tests.router.harness import QUICK_LOSS, TOKEN, Harness, blocks, run
from tests.server.harness import byte_tokenizer, error

pytestmark = pytest.mark.slow


def test_an_answer_is_the_instances_own():
    """Text, usage and headers are unchanged; the instance is named."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)

        routed = await harness.complete(request_id="a")
        async with httpx.AsyncClient(base_url=one.url) as client:
            body = {"prompt": "hello " * 20, "seed": 7, "max_tokens": 4}
            direct = await client.post("/v1/completions", json=body)

        assert routed.status_code == 200
        assert routed.json()["choices"] == direct.json()["choices"]
        assert routed.headers["x-headwater-instance"] == one.name
        assert routed.headers["x-request-id"] == "a"
        assert (await harness.client.get("/v1/models")).json()["data"][0]["id"] == "echo"
        assert (await harness.client.post("/tokenize", json={"prompt": "x"})).json()[
            "count"
        ] == 1
        assert (await harness.complete(max_tokens=-1)).status_code == 400
        assert (await harness.client.get("/nothing")).status_code == 404

    run(scenario)


def test_the_models_of_all_groups_are_listed():
    """With two models behind one router, both are listed, each can be asked for by name, and a
    request gets the one that it names."""

    async def scenario(harness):
        one = harness.add()
        shorter = harness.add(max_model_len=512)
        other = harness.add(model_name="another", fingerprint="0f" * 32)
        await harness.ready(one, shorter, other)
        get = harness.client.get

        cards = {card["id"]: card for card in (await get("/v1/models")).json()["data"]}
        assert set(cards) == {"echo", "another"}
        assert cards["echo"]["max_model_len"] == 512, "the limit of the shorter instance"
        for name, card in cards.items():
            assert (await get(f"/v1/models/{name}")).json() == card
            answer = await harness.complete(model=name)
            assert answer.json()["model"] == name, answer.text
        refused = await get("/v1/models/third")
        assert refused.status_code == 404
        assert "serve 'echo', 'another'" in refused.json()["error"]["message"]

    run(scenario)


def test_no_model_is_listed_without_an_instance():
    """The answer is a 503 that says how to start one, as for any other request."""

    async def scenario(harness):
        for path in ("/v1/models", "/v1/models/echo"):
            refused = await harness.client.get(path)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "no_instance"

    run(scenario)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_conversation_stays_where_its_blocks_are(salt):
    """Lesson 72: the router knows the blocks from the instance's own events, including salted
    prompts."""

    async def scenario(harness):
        instances = [harness.add() for _ in range(3)]
        await harness.ready(*instances)
        extra = {} if salt is None else {"cache_salt": salt}

        prompts = [f"conversation {n} " * 10 for n in range(3)]
        answers = [await harness.complete(prompt=prompt, **extra) for prompt in prompts]
        homes = [answer.headers["x-headwater-instance"] for answer in answers]
        await harness.until(lambda known: all(e["known_blocks"] > 8 for e in known.values()))
        for prompt, home in zip(prompts, homes, strict=True):
            answer = await harness.complete(prompt=prompt + " and more", **extra)
            assert answer.headers["x-headwater-instance"] == home
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] >= 128
        assert len(set(homes)) == 3

    run(scenario)


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()], ids=["asked", "own"])
def test_chats_stay_at_their_instance_with_and_without_a_tokenizer_at_the_router(tokenizer):
    """The model's tokenizer and an instance's give the same tokens, so the same blocks."""

    async def scenario(harness):
        await harness.ready(harness.add(), harness.add())
        for number in range(3):
            content = f"conversation {number} " * 10
            for _ in range(2):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
                answer = await harness.client.post("/v1/chat/completions", json=body)
                await harness.until(
                    lambda known, least=9 * (number + 1): blocks(known) >= least
                )
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
        text = (await harness.client.get("/metrics")).text
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("headwater:router_cached_tokens_total{")
        ]
        assert not line.endswith(" 0.0")

    run(scenario, tokenizer=tokenizer)


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()], ids=["asked", "own"])
def test_a_history_with_tool_calls_and_no_content_is_routed(tokenizer):
    """`content` may be null in a message with calls."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "done"}]},
    ]

    async def scenario(harness):
        await harness.ready(harness.add())
        answer = await harness.client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 2}
        )
        assert answer.status_code == 200, answer.text

    run(scenario, tokenizer=tokenizer)


def test_round_robin_takes_turns():
    """The operator chooses the policy."""

    async def scenario(harness):
        one, two = harness.add(), harness.add()
        await harness.ready(one, two)

        names = [(await harness.complete()).headers["x-headwater-instance"] for _ in range(4)]

        assert names[:2] == names[2:]
        assert set(names) == {one.name, two.name}

    run(scenario, policy="round_robin")


def test_an_instance_with_another_token_is_refused_with_a_message():
    """A wrong token ends the start of the instance."""

    async def scenario(harness):
        await harness.ready(harness.add())
        refused: list[tuple[dict[str, Any], str]] = [
            ({"token": "wrong"}, "peer token"),
            ({"token": None}, "peer token"),
        ]
        for changes, word in refused:
            with pytest.raises(ConfigError, match=f"refuses this instance: .*{word}"):
                await harness.add(**changes).membership
        assert len(await harness.known()) == 1

    run(scenario)


def test_a_wiped_cache_is_noticed():
    """Lesson 71: a reset reaches the router like any other event."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        await harness.complete()
        await harness.until(lambda known: known[one.name]["known_blocks"] > 0)

        await one.engine.control(ResetCache())

        known = await harness.until(lambda known: known[one.name]["known_blocks"] == 0)
        assert known[one.name]["trust"] == "exact"

    run(scenario)


def test_a_router_that_comes_late_learns_all():
    """Lesson 71: the first events are no longer in the buffer, so the instance sends a
    snapshot, and every cached block is known."""

    async def scenario(harness):
        first = harness.add(buffer_steps=1)
        await harness.ready(first)
        for number in range(5):
            await harness.complete(prompt=f"{number} is a number " * 5)
        known = await harness.until(lambda known: known[first.name]["known_blocks"] >= 20)
        blocks = known[first.name]["known_blocks"]

        late = Harness()
        late.start()
        registrar = Registrar(
            first.service, router=late.url, url=first.url, cluster=first.cluster
        )
        membership = asyncio.create_task(registrar.run(lambda error: None))
        await late.until(lambda known: first.name in known)
        await late.until(
            lambda known: (
                known[first.name]["known_blocks"] == blocks
                and known[first.name]["trust"] == "exact"
            )
        )
        membership.cancel()
        await late.close()

    run(scenario)


def test_without_events_load_decides():
    """Load is the explicit fallback: nothing is assumed about a cache without events."""

    async def scenario(harness):
        one, two = harness.add(events=False), harness.add(events=False)
        await harness.until(lambda known: len(known) == 2)

        for _ in range(4):
            assert (await harness.complete()).status_code == 200

        known = await harness.known()
        assert {entry["trust"] for entry in known.values()} == {"fallback"}
        assert min(one.num_steps, two.num_steps) > 0

    run(scenario)


def test_requests_without_the_token_are_limited():
    """Lessons 66 and 68: a registration without the token is refused; malformed and too large
    requests are 4xx; internal headers of clients are not forwarded."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        headers = {TOKEN_HEADER: TOKEN, "content-type": "application/json"}
        post = harness.client.post

        assert (await post("/instances", json={})).status_code == 403
        assert (await harness.client.delete(f"/instances/{one.name}")).status_code == 403
        assert (await post("/instances", json={}, headers=headers)).status_code == 400
        assert (await post("/instances", content=b"{", headers=headers)).status_code == 400
        huge = b" " * 100_000
        assert (await post("/instances", content=huge, headers=headers)).status_code == 413
        told = {**(await harness.known())[one.name]}
        for field, value in [
            ("url", "ftp://x"),
            ("fingerprint", "XYZ"),
            ("role", "king"),
            ("block_tokens", 0),
            ("kv_events", {"endpoint": "ipc://x", "replay_endpoint": "tcp://x:1"}),
        ]:
            answer = await post("/instances", json=told | {field: value}, headers=headers)
            assert answer.status_code == 400, field
        other = told | {"version": 9, "instance_id": "other"}
        assert (await post("/instances", json=other, headers=headers)).status_code == 409
        missing = await harness.client.delete("/instances/unknown", headers=headers)
        assert missing.status_code == 404
        spoofed = await post(
            "/v1/completions",
            json={"prompt": "x"},
            headers={"x-headwater-prefill": "evil:1", TOKEN_HEADER: TOKEN},
        )
        assert spoofed.status_code == 200
        big = await post("/v1/completions", content=b"x" * 2_000_000)
        assert big.status_code == 413

    run(scenario, max_body_bytes=1_000_000)


def test_requests_above_the_limit_are_a_429():
    """Lesson 68: above the limit there is an immediate 429."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(harness.complete())
        await one.until_alive(1)

        answer = await harness.complete()

        assert answer.status_code == 429
        one.engine.flow()
        assert (await waiting).status_code == 200

    run(scenario, max_requests=1)


def test_metrics_name_the_chosen_instance_and_the_reason():
    """There are counters by instance and trust, and gauges of the state of each instance."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        await harness.complete()

        text = (await harness.client.get("/metrics")).text

        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["headwater:router_requests_total", "answered"] == 1
        assert samples["headwater:router_routed_total", one.name, "exact"] == 1
        (group,) = {entry["group"] for entry in (await harness.known()).values()}
        assert samples["headwater:router_prompt_tokens_total", group] > 0
        assert samples["headwater:router_trust", one.name, "exact"] == 1
        assert samples["headwater:router_instances", one.name, "mixed", "ready"] == 1

    run(scenario)


def test_a_stored_response_waits_for_its_silent_instance():
    """While the instance is silent the answer is a 503; the next engine of the same server has
    the id again. An id of a server that was never seen is a 404."""

    async def scenario(harness):
        body = {"input": "hello", "max_output_tokens": 4}
        first = harness.add(epoch="server.1")
        await harness.ready(first)
        stored = (await harness.client.post("/v1/responses", json=body)).json()
        assert stored["id"].startswith("resp_server_")
        await first.die()
        harness.instances.remove(first)
        await harness.until(lambda known: not known)
        asked = body | {"previous_response_id": stored["id"]}
        away = await harness.client.post("/v1/responses", json=asked)
        assert error(away, 503)["code"] == "instance_lost"
        assert "retry-after" in away.headers
        unknown = body | {"previous_response_id": "resp_other_1"}
        refused = await harness.client.post("/v1/responses", json=unknown)
        assert error(refused, 404)["code"] == "previous_response_not_found"
        second = harness.add(epoch="server.2")
        await harness.ready(second)
        again = await harness.client.post("/v1/responses", json=asked)
        assert again.headers["x-headwater-instance"] == second.name

    run(scenario, **QUICK_LOSS)


def test_a_request_is_routed_although_an_instance_tokenizes_it_wrongly():
    """Token ids that are no int32 are no reason for a 500: the request is routed by load."""

    async def scenario(harness):
        one = harness.add()
        await harness.ready(one)
        served = create_app(one.service)

        async def app(scope, receive, send):
            if scope["path"] == "/tokenize":
                wrong = JSONResponse({"tokens": [1 << 40]})
                await wrong(scope, receive, send)
            else:
                await served(scope, receive, send)

        one.readiness.open(app)
        assert (await harness.complete()).status_code == 200

    run(scenario)
