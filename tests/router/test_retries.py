"""What the router retries, on which instances, and when it stops."""

import asyncio
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater.server.app import create_app
from headwater.server.cluster_auth import SIGNATURE_HEADER
from headwater.server.router.protocol import FALLBACK_HEADER, PREFILL_HEADER, TOKEN_HEADER
from tests.router.harness import run

pytestmark = pytest.mark.slow


def test_retries_have_a_budget():
    """Lesson 56: refused requests are tried elsewhere, and nothing is retried for ever."""

    async def scenario(harness):
        instances = [harness.add() for _ in range(3)]
        await harness.ready(*instances)
        for instance in instances:
            instance.readiness.drain()

        answer = await harness.complete()

        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        text = (await harness.client.get("/metrics")).text
        failures = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "headwater:router_failures_total"
        ]
        assert sum(failures) <= 3

    run(scenario, max_attempts=2)


def test_an_outage_is_not_answered_with_more_load():
    """Lesson 56: there are ten retries at once and one for every five requests, however many
    instances exist; all other requests fail at once."""

    async def scenario(harness):
        instances = [harness.add() for _ in range(3)]
        await harness.ready(*instances)
        for instance in instances:
            instance.readiness.drain()

        answers = await asyncio.gather(*(harness.complete() for _ in range(40)))

        assert {answer.status_code for answer in answers} == {503}
        metrics = (await harness.client.get("/metrics")).text
        asked = re.findall(r"router_failures_total{.*} (\S+)", metrics)
        assert 0 < sum(map(float, asked)) <= 40 + 10 + 40 / 5

    run(scenario)


class Refusing:
    """A decode instance whose first prefill peer is always busy; records its requests."""

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
    """Lesson 56: another pair is tried; instead of the last prefill instance the decode
    instance may compute the prompt; a short rest is never handed off."""

    async def scenario(harness):
        decode = harness.add(role="decode")
        refusing = Refusing(create_app(decode.service))
        decode.readiness.open(refusing)
        for port in (1, 2):
            harness.add(role="prefill", peer_address=f"127.0.0.1:{port}")
        await harness.ready(*harness.instances)

        assert (await harness.complete()).status_code == 200
        assert (await harness.complete(prompt="short")).status_code == 200

        first, second, third = refusing.asked
        peers = {first[PREFILL_HEADER], second[PREFILL_HEADER]}
        assert peers == {"127.0.0.1:1", "127.0.0.1:2"}
        assert first[SIGNATURE_HEADER] != second[SIGNATURE_HEADER]
        assert TOKEN_HEADER not in first
        assert FALLBACK_HEADER not in first
        assert second[FALLBACK_HEADER] == "local"
        assert PREFILL_HEADER not in third
        known = await harness.known()
        assert {entry["outstanding_tokens"] for entry in known.values()} == {0}
        assert {entry["num_alive"] for entry in known.values()} == {0}

    run(scenario, prefill_threshold=64)


def test_a_decode_instance_without_room_is_passed_over():
    """Lesson 56: the prefill instance has not failed; it computes the prompt for another decode
    instance."""

    async def scenario(harness):
        decodes = [harness.add(role="decode") for _ in range(2)]
        refusing = [Refusing(create_app(entry.service), "no_room") for entry in decodes]
        for entry, app in zip(decodes, refusing, strict=True):
            entry.readiness.open(app)
        harness.add(role="prefill", peer_address="127.0.0.1:1")
        await harness.ready(*harness.instances)

        await harness.complete()

        (first,), (second,) = (app.asked for app in refusing)
        assert first[PREFILL_HEADER] == second[PREFILL_HEADER] == "127.0.0.1:1"

    run(scenario, prefill_threshold=64)
