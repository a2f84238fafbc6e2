"""The router over real sockets: who gets a request, and what happens when that fails."""

import asyncio
import contextlib
import json
import re
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.errors import ConfigError
from headwater.server.app import create_app
from headwater.server.continuation import RETURNED, mark_line
from headwater.server.registration import Registrar
from headwater.server.router.messages import FALLBACK_HEADER, PREFILL_HEADER, TOKEN_HEADER
from tests.router.rig import TOKEN, HangingEngine, Rig, events, run
from tests.server.rig import byte_tokenizer

pytestmark = pytest.mark.slow


def test_an_answer_is_the_instances_own():
    """Text, usage and headers as they came; the instance is named."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)

        routed = await rig.complete(request_id="a")
        async with httpx.AsyncClient(base_url=one.url) as client:
            body = {"prompt": "hello " * 20, "seed": 7, "max_tokens": 4}
            direct = await client.post("/v1/completions", json=body)

        assert routed.status_code == 200
        assert routed.json()["choices"] == direct.json()["choices"]
        assert routed.headers["x-headwater-instance"] == one.name
        assert routed.headers["x-request-id"] == "a"
        assert (await rig.client.get("/v1/models")).json()["data"][0]["id"] == "echo"
        assert (await rig.client.post("/tokenize", json={"prompt": "x"})).json()["count"] == 1
        assert (await rig.complete(max_tokens=-1)).status_code == 400
        assert (await rig.client.get("/nothing")).status_code == 404

    run(scenario)


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_conversation_stays_where_its_blocks_are(salt):
    """Lesson 72: known from the instance's own events, salted prompts included."""

    async def scenario(rig):
        instances = [rig.add() for _ in range(3)]
        await rig.ready(*instances)
        extra = {} if salt is None else {"cache_salt": salt}

        prompts = [f"conversation {n} " * 10 for n in range(3)]
        answers = [await rig.complete(prompt=prompt, **extra) for prompt in prompts]
        homes = [answer.headers["x-headwater-instance"] for answer in answers]
        await rig.until(lambda known: all(e["known_blocks"] > 8 for e in known.values()))
        for prompt, home in zip(prompts, homes, strict=True):
            answer = await rig.complete(prompt=prompt + " and more", **extra)
            assert answer.headers["x-headwater-instance"] == home
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert details["cached_tokens"] >= 128
        assert len(set(homes)) == 3

    run(scenario)


@pytest.mark.parametrize("tokenizer", [None, byte_tokenizer()], ids=["asked", "own"])
def test_chats_stay_too_whoever_tokenises(tokenizer):
    """With the model's tokenizer or an instance's: the same tokens, so the same blocks."""

    async def scenario(rig):
        await rig.ready(rig.add(), rig.add())
        for number in range(3):
            content = f"conversation {number} " * 10
            for _ in range(2):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
                answer = await rig.client.post("/v1/chat/completions", json=body)
                await rig.until(lambda known, least=9 * (number + 1): blocks(known) >= least)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
        text = (await rig.client.get("/metrics")).text
        assert "headwater:router_cached_tokens_total 0.0" not in text

    run(scenario, tokenizer=tokenizer)


def test_round_robin_takes_turns():
    """The policy is the router's to choose."""

    async def scenario(rig):
        one, two = rig.add(), rig.add()
        await rig.ready(one, two)

        names = [(await rig.complete()).headers["x-headwater-instance"] for _ in range(4)]

        assert names[:2] == names[2:]
        assert set(names) == {one.name, two.name}

    run(scenario, policy="round_robin")


def test_another_model_is_refused_with_a_sentence():
    """A fingerprint, a block size or a token that does not fit ends the instance's start."""

    async def scenario(rig):
        await rig.ready(rig.add())
        refused: list[tuple[dict[str, Any], str]] = [
            ({"fingerprint": "ab" * 32}, "model fingerprint"),
            ({"block_tokens": 32}, "block size"),
            ({"kv_format": "x"}, "KV format"),
            ({"token": "wrong"}, "peer token"),
            ({"token": None}, "peer token"),
        ]
        for changes, word in refused:
            with pytest.raises(ConfigError, match=f"refuses this instance: .*{word}"):
                await rig.add(**changes).membership
        assert len(await rig.known()) == 1

    run(scenario)


def test_a_dead_instance_is_not_noticed_by_clients():
    """Retries go elsewhere; the dead one is soon forgotten, and nothing is believed of it."""

    async def scenario(rig):
        one, two = rig.add(), rig.add()
        await rig.ready(one, two)
        first = await rig.complete()
        home = one if first.headers["x-headwater-instance"] == one.name else two

        await home.die()

        answer = await rig.complete()
        assert answer.status_code == 200
        assert answer.json()["choices"] == first.json()["choices"]
        await rig.until(lambda known: set(known) == {one.name, two.name} - {home.name})
        assert (await rig.client.get("/health")).status_code == 200

    run(scenario)


def blocks(known):
    """All that instances said they have."""
    return sum(entry["known_blocks"] for entry in known.values())


def said(found):
    """Of each choice: the text, who speaks, how it ended, and its log-probabilities."""
    answers: dict[int, list[Any]] = {}
    for event in found:
        for choice in event["choices"]:
            answer = answers.setdefault(choice["index"], ["", [], [], []])
            part = choice.get("delta") or {"content": choice["text"]}
            answer[0] += part.get("content", "")
            answer[1] += [part["role"]] if "role" in part else []
            answer[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs = choice.get("logprobs") or {}
            answer[3] += logprobs.get("content") or logprobs.get("tokens") or []
    return answers


async def broken_stream(rig, path, body, *, how, others=1):
    """A stream whose instance dies in the middle, while there are others; its text."""
    one = rig.add()
    await rig.ready(one)
    async with rig.client.stream("POST", path, json=body) as answer:
        lines = answer.aiter_text()
        text = await anext(lines)
        one.engine.hold()
        for _ in range(others):
            rig.add()
        await rig.until(lambda known: len(known) == 1 + others)
        if how == "error":
            one.engine.die("out of memory")
        elif how == "stop":
            one.gate.shut("the server is stopping")
            one.service.is_stopping = True
            await one.engine.abort(None)
        else:
            await one.die()
        return text + "".join([piece async for piece in lines])


MANY = {"n": 3, "logprobs": 1, "presence_penalty": 0.5, "stop": ["q", "Qm"]}


@pytest.mark.parametrize("how", ["error", "stop", "kill"])
@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", MANY),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", MANY | {"logprobs": True, "top_logprobs": 2}),
    ],
)
def test_a_stream_that_breaks_goes_on_elsewhere(path, extra, how):
    """Token by token, as if nothing had happened, however many choices it has and whatever is
    said with them; marks between us never reach a client."""

    async def scenario(rig):
        body: dict[str, Any] = {"max_tokens": 300, "stream": True, "seed": 5} | extra
        body |= {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}

        text = await broken_stream(rig, path, body, how=how)
        whole = await rig.client.post(path, json=body)

        assert ": headwater" not in text
        assert said(events(text)) == said(events(whole.text))
        assert len({e["id"] for e in events(text)}) == 1

    run(scenario)


def test_many_streams_go_on_at_once():
    """However many an instance had: each is taken up once, which is no new load, so the budget
    of retries is not asked; it is for requests that are made again from the start."""

    async def scenario(rig):
        one = rig.add(num_seqs=16)
        await rig.ready(one)
        body = {"prompt": "hello", "max_tokens": 60, "stream": True}
        async with contextlib.AsyncExitStack() as streams:
            one.engine.hold()
            starting = [
                asyncio.create_task(
                    streams.enter_async_context(
                        rig.client.stream("POST", "/v1/completions", json=body | {"seed": seed})
                    )
                )
                for seed in range(16)
            ]
            await one.until_alive(16)
            one.engine.flow()
            answers = [(await task).aiter_text() for task in starting]
            one.engine.hold()
            await rig.ready(rig.add(num_seqs=16))
            await one.die()
            texts = ["".join([piece async for piece in answer]) for answer in answers]
        for seed, text in enumerate(texts):
            whole = await rig.client.post("/v1/completions", json=body | {"seed": seed})
            assert said(events(text)) == said(events(whole.text))
        metrics = (await rig.client.get("/metrics")).text
        taken_up = re.search(r'router_failures_total{.*reason="broken"} (\d+)', metrics)
        assert taken_up is not None
        assert int(taken_up.group(1)) > 10

    run(scenario)


def test_a_stream_that_nobody_can_take_up_ends_with_a_typed_error():
    """Lesson 53: tokens were streamed and nobody is left to go on; the client is told in the
    stream, once."""

    async def scenario(rig):
        body = {"prompt": "hello", "max_tokens": 300, "stream": True}

        text = await broken_stream(rig, "/v1/completions", body, how="kill", others=0)

        *before, last = events(text)
        assert last["error"]["code"] == "instance_lost"
        assert before[0]["choices"]
        assert all(event["choices"][0]["finish_reason"] is None for event in before)

    run(scenario)


class GivingBack:
    """An instance that has no room to go on after a few events, `times` in a row."""

    def __init__(self, app, times):
        self._app = app
        self._left = times

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        gives_back, self._left, num_bodies = self._left > 0, self._left - 1, 0

        async def limited(message):
            nonlocal num_bodies
            num_bodies += message["type"] == "http.response.body"
            if gives_back and num_bodies == 3:
                message = message | {"body": mark_line(RETURNED) + b"data: {}\n\n"}
            await send(message)

        await self._app(scope, receive, limited)


@pytest.mark.parametrize(("times", "num_instances"), [(1, 2), (7, 1)])
def test_what_is_given_back_goes_on(times, num_instances):
    """Lesson 55: elsewhere, or there again where there is no other, as often as it got further;
    the instance has not failed, and gets others meanwhile."""

    async def scenario(rig):
        instances = [rig.add() for _ in range(num_instances)]
        await rig.ready(*instances)
        body = {"prompt": "hello " * 20, "max_tokens": 60, "stream": True, "seed": 5}
        whole = await rig.client.post("/v1/completions", json=body)
        await rig.until(lambda known: blocks(known) > 6)
        home = next(i for i in instances if i.name == whole.headers["x-headwater-instance"])
        home.gate.open(GivingBack(create_app(home.service), times))

        answer = await rig.client.post("/v1/completions", json=body)

        assert said(events(answer.text)) == said(events(whole.text))
        assert (await rig.known())[home.name]["state"] == "ready"
        metrics = (await rig.client.get("/metrics")).text
        assert f'reason="returned"}} {float(times)}' in metrics

    run(scenario)


def test_events_are_passed_on_as_they_come():
    """Streaming without buffering: the first event is there while the engine stands still."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        body = {"prompt": "hello", "max_tokens": 8, "stream": True, "ignore_eos": True}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_text()
            text = await anext(lines)
            one.engine.hold()
            known = await rig.known()
            assert known[one.name]["num_alive"] == 1
            assert known[one.name]["outstanding_tokens"] == 0
            one.engine.flow()
            text += "".join([piece async for piece in lines])
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"

    run(scenario)


def test_a_client_that_leaves_ends_its_request_at_the_instance():
    """Lesson 58: nobody generates for nobody."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(rig.complete(max_tokens=200))
        await one.until_alive(1)
        waiting.cancel()
        await one.until_alive(0)
        one.engine.flow()
        assert (await rig.complete()).status_code == 200

    run(scenario)


def test_an_instance_that_hangs_loses_its_requests():
    """Lesson 52: one that does not respond blocks nobody. No heartbeat for too long, and what
    waits there is computed elsewhere, within a bound."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(rig.complete())
        await one.until_alive(1)
        one.membership.cancel()
        two = rig.add()

        answer = await waiting

        assert answer.status_code == 200
        assert answer.headers["x-headwater-instance"] == two.name
        one.engine.flow()

    run(scenario)


def test_an_instance_whose_engine_hangs_says_nothing_for_it():
    """Lesson 52: its HTTP lives on, but that is no sign of life; a stream goes on elsewhere, and
    it is back when the engine is."""

    async def scenario(rig):
        one = rig.add(engine=HangingEngine, silent_s=0.3)
        await rig.ready(one)
        body = {"prompt": "hello", "max_tokens": 300, "stream": True, "seed": 5}
        async with rig.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            one.engine.hold()
            two = rig.add()
            text += "".join([piece async for piece in pieces])
        assert two.name in await rig.known()
        one.engine.flow()
        await rig.ready(one)
        whole = await rig.client.post("/v1/completions", json=body)

        assert said(events(text)) == said(events(whole.text))

    run(scenario)


def test_a_draining_instance_gets_nothing_new():
    """Lesson 59: it ends what it has; heartbeats do not bring it back; a new life does."""

    async def scenario(rig):
        one, two = rig.add(), rig.add()
        await rig.ready(one, two)
        await one.registrar.leave()

        names = {(await rig.complete()).headers["x-headwater-instance"] for _ in range(6)}

        assert names == {two.name}
        assert (await rig.known())[one.name]["state"] == "draining"
        await two.registrar.leave()
        answer = await rig.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_instance"
        assert (await rig.client.get("/health")).status_code == 503

    run(scenario)


def test_a_router_that_comes_late_hears_who_drains():
    """Lesson 59: an instance that is stopping registers at it, for what it still has, as such."""

    async def scenario(rig):
        one, two = rig.add(), rig.add()
        one.service.is_stopping = True

        await rig.until(lambda known: known.get(one.name, {}).get("state") == "draining")
        await rig.ready(one, two)

        names = {(await rig.complete()).headers["x-headwater-instance"] for _ in range(4)}
        assert names == {two.name}

    run(scenario)


def test_a_restarted_instance_is_another():
    """Lesson 71: with a new epoch nothing is left of what was believed."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        await rig.complete()
        await rig.until(lambda known: known[one.name]["known_blocks"] > 0)
        port = one.listener.getsockname()[1]
        await one.die()

        again = rig.add(epoch="2", port=port)
        known = await rig.until(lambda known: known[again.name]["epoch"] == "2")
        assert known[again.name]["known_blocks"] == 0
        await rig.ready(again)
        assert (await rig.complete()).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ] == 0

    run(scenario, stale_s=4.0, forget_s=8.0)


def test_a_wiped_cache_is_noticed():
    """Lesson 71: a reset reaches the router as any other event."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        await rig.complete()
        await rig.until(lambda known: known[one.name]["known_blocks"] > 0)

        await one.engine.reset_cache()

        known = await rig.until(lambda known: known[one.name]["known_blocks"] == 0)
        assert known[one.name]["trust"] == "exact"

    run(scenario)


def test_a_router_that_comes_late_learns_all():
    """Lesson 71: beyond the buffer there is a snapshot, so nothing cached is unknown."""

    async def scenario(rig):
        first = rig.add(buffer_steps=1)
        await rig.ready(first)
        for number in range(5):
            await rig.complete(prompt=f"{number} is a number " * 5)
        known = await rig.until(lambda known: known[first.name]["known_blocks"] >= 20)
        blocks = known[first.name]["known_blocks"]

        late = Rig()
        late.start()
        registrar = Registrar(first.service, router=late.url, url=first.url)
        membership = asyncio.create_task(registrar.run())
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
    """The explicit fallback: nothing is guessed about a cache that says nothing."""

    async def scenario(rig):
        one, two = rig.add(events=False), rig.add(events=False)
        await rig.until(lambda known: len(known) == 2)

        for _ in range(4):
            assert (await rig.complete()).status_code == 200

        known = await rig.known()
        assert {entry["trust"] for entry in known.values()} == {"fallback"}
        assert min(one.num_steps, two.num_steps) > 0

    run(scenario)


def test_retries_have_a_budget():
    """Lesson 56: refusals are tried elsewhere, and nothing loops for ever."""

    async def scenario(rig):
        instances = [rig.add() for _ in range(3)]
        await rig.ready(*instances)
        for instance in instances:
            instance.gate.shut("not now")

        answer = await rig.complete()

        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "not now"
        text = (await rig.client.get("/metrics")).text
        failures = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "headwater:router_failures_total"
        ]
        assert sum(failures) <= 3

    run(scenario, max_attempts=2)


def test_an_outage_is_not_answered_with_more_load():
    """Lesson 56: ten retries at once and one for every five requests, however many instances
    there are to try; the rest is told at once that nobody can."""

    async def scenario(rig):
        instances = [rig.add() for _ in range(3)]
        await rig.ready(*instances)
        for instance in instances:
            instance.gate.shut("not now")

        answers = await asyncio.gather(*(rig.complete() for _ in range(40)))

        assert {answer.status_code for answer in answers} == {503}
        metrics = (await rig.client.get("/metrics")).text
        asked = re.findall(r"router_failures_total{.*} (\S+)", metrics)
        assert 0 < sum(map(float, asked)) <= 40 + 10 + 40 / 5

    run(scenario)


class Refusing:
    """A decode instance whose first prefill peer is always busy; notes what it was asked."""

    def __init__(self, app, code="busy"):
        self._app = app
        self._code = code
        self.asked: list[dict[str, str]] = []

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        found = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append({n: v for n, v in found.items() if n.startswith("x-headwater")})
        error = {"message": "no", "type": "peer_refused", "code": self._code}
        body = json.dumps({"error": error}).encode()
        status = 503 if len(self.asked) == 1 else 200
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_a_prefill_instance_that_refuses_is_passed_over():
    """Lesson 56: another pair is tried; whoever is the last may be replaced by the decode
    instance itself; a short rest is never handed over."""

    async def scenario(rig):
        decode = rig.add(role="decode")
        refusing = Refusing(create_app(decode.service))
        decode.gate.open(refusing)
        for port in (1, 2):
            rig.add(role="prefill", peer_address=f"127.0.0.1:{port}")
        await rig.ready(*rig.instances)

        assert (await rig.complete()).status_code == 200
        assert (await rig.complete(prompt="short")).status_code == 200

        first, second, third = refusing.asked
        peers = {first[PREFILL_HEADER], second[PREFILL_HEADER]}
        assert peers == {"127.0.0.1:1", "127.0.0.1:2"}
        assert first[TOKEN_HEADER] == second[TOKEN_HEADER] == TOKEN
        assert FALLBACK_HEADER not in first
        assert second[FALLBACK_HEADER] == "local"
        assert PREFILL_HEADER not in third
        known = await rig.known()
        assert {entry["outstanding_tokens"] for entry in known.values()} == {0}
        assert {entry["num_alive"] for entry in known.values()} == {0}

    run(scenario, prefill_threshold=64)


def test_a_decode_instance_without_room_is_passed_over():
    """Lesson 56: it is not the prefill instance's fault, which computes it for another."""

    async def scenario(rig):
        decodes = [rig.add(role="decode") for _ in range(2)]
        refusing = [Refusing(create_app(entry.service), "no_room") for entry in decodes]
        for entry, app in zip(decodes, refusing, strict=True):
            entry.gate.open(app)
        rig.add(role="prefill", peer_address="127.0.0.1:1")
        await rig.ready(*rig.instances)

        await rig.complete()

        (first,), (second,) = (app.asked for app in refusing)
        assert first[PREFILL_HEADER] == second[PREFILL_HEADER] == "127.0.0.1:1"

    run(scenario, prefill_threshold=64)


def test_strangers_are_bounded():
    """Lesson 66 and 68: no token no registration; nonsense and too much are 4xx; internal
    headers of clients are not passed on."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        headers = {TOKEN_HEADER: TOKEN}
        post = rig.client.post

        assert (await post("/instances", json={})).status_code == 403
        assert (await rig.client.delete(f"/instances/{one.name}")).status_code == 403
        assert (await post("/instances", json={}, headers=headers)).status_code == 400
        assert (await post("/instances", content=b"{", headers=headers)).status_code == 400
        huge = b" " * 100_000
        assert (await post("/instances", content=huge, headers=headers)).status_code == 413
        told = {**(await rig.known())[one.name]}
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
        missing = await rig.client.delete("/instances/nobody", headers=headers)
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


def test_no_more_requests_than_may_be():
    """Lesson 68: beyond the limit it is a 429, at once."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        one.engine.hold()
        waiting = asyncio.create_task(rig.complete())
        await one.until_alive(1)

        answer = await rig.complete()

        assert answer.status_code == 429
        one.engine.flow()
        assert (await waiting).status_code == 200

    run(scenario, max_requests=1)


def test_metrics_say_who_was_chosen_and_why():
    """Counters by instance and trust; gauges of how each stands."""

    async def scenario(rig):
        one = rig.add()
        await rig.ready(one)
        await rig.complete()

        text = (await rig.client.get("/metrics")).text

        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["headwater:router_requests_total", "answered"] == 1
        assert samples["headwater:router_routed_total", one.name, "exact"] == 1
        assert samples["headwater:router_prompt_tokens_total",] > 0
        assert samples["headwater:router_trust", one.name, "exact"] == 1
        assert samples["headwater:router_instances", one.name, "mixed", "ready"] == 1

    run(scenario)
