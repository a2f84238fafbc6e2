"""Constrained streams and stored responses through a router, with instances that are killed."""

import json
import os
import signal
import time
from typing import Any

import httpx
import pytest

from tests.e2e.live import LiveServer
from tests.router.live import LiveRouter
from tests.router.test_live import NAME, broken_stream, kill, name, start
from tests.waiting import until

pytestmark = pytest.mark.slow

NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 40,
    "maxItems": 40,
}
ARGUMENTS = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
MESSAGES = [{"role": "user", "content": "Many numbers, please. " * 20}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}]


@pytest.fixture
def cluster():
    router = LiveRouter()
    servers = [start(router) for _ in range(2)]
    for server in servers:
        server.wait_ready()
    router.until_exact(*servers)
    yield router, servers
    for server in servers:
        if server.process.poll() is None:
            assert server.stop() == 0, server.errors
    assert router.stop() == 0


def home_of(servers: list[LiveServer], answer: httpx.Response) -> LiveServer:
    return next(server for server in servers if name(server) == answer.headers[NAME])


def ask(method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """An answer other than 503: on a busy machine heartbeats are late, and instances come back."""
    for _ in range(100):
        answer = httpx.request(method, url, json=body, timeout=60)
        if answer.status_code != 503:
            break
        time.sleep(0.2)
    return answer


def until_restarted(server: LiveServer) -> None:
    """Wait until the engine was replaced once and the new one answers."""
    until(
        lambda: "headwater:engine_restarts_total 1" in server.get("/metrics").text, within_s=60
    )
    server.until_healthy()


def events(
    router: LiveRouter,
    path: str,
    body: dict[str, Any],
    servers: list[LiveServer],
    *,
    after: int = 2,
) -> Any:
    """All events of a stream whose instance is killed after this many of them."""
    found: list[Any] = []
    with httpx.stream("POST", router.url + path, json=body, timeout=60) as response:
        victim = home_of(servers, response)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                if len(found) == after:
                    kill(victim)
    return found


def test_a_killed_instances_constrained_stream_continues_valid(cluster):
    """The continued stream has the tokens of an undisturbed instance, and follows its
    schema."""
    router, servers = cluster
    fields = {
        "prompt": "a constrained stream that breaks, " * 20,
        "max_tokens": 2000,
        "seed": 3,
        "temperature": 0.8,
        "return_token_ids": True,
        "structured_outputs": {"json": NUMBERS},
        "ignore_eos": False,
    }
    _, pieces = broken_stream(router, servers, fields, after=20)

    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert len(json.loads(text)) == 40
    whole = router.post(**fields).json()["choices"][0]
    tokens = [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert tokens == whole["token_ids"]


def test_a_killed_instances_tool_call_comes_whole(cluster):
    """The instance is killed inside the arguments; the other instance sends exactly the rest of
    their text."""
    router, servers = cluster
    body = {
        "messages": MESSAGES,
        "tools": CHAT_TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 2000,
        "seed": 4,
        "stream": True,
    }
    chunks = events(router, "/v1/chat/completions", body, servers, after=30)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert sum("role" in delta for delta in deltas) == 1
    first, *rest = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert first["function"]["name"] == "add"
    assert len(rest) > 60
    assert all(set(call) == {"index", "function"} for call in rest)
    assert {call["index"] for call in rest} == {0}
    text = "".join(call["function"]["arguments"] for call in (first, *rest))
    assert len(json.loads(text)["numbers"]) == 40
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    url = router.url + "/v1/chat/completions"
    whole = ask("POST", url, {**body, "stream": False}).json()["choices"][0]["message"]
    assert whole["tool_calls"][0]["function"]["arguments"] == text


def test_a_killed_instances_message_comes_whole(cluster):
    """Anthropic's events have one beginning, blocks in order and one end."""
    router, servers = cluster
    body = {
        "messages": MESSAGES,
        "max_tokens": 200,
        "seed": 4,
        "stream": True,
    }
    found = events(router, "/v1/messages", body, servers)
    kinds = [event["type"] for event in found]
    assert kinds.count("message_start") == kinds.count("message_stop") == 1
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    whole = ask("POST", router.url + "/v1/messages", {**body, "stream": False}).json()
    text = "".join(
        e["delta"].get("text", "") for e in found if e["type"] == "content_block_delta"
    )
    assert text == whole["content"][0]["text"]


def test_a_stored_response_leads_to_its_instance(cluster):
    """The instance that has the response is chosen at any load and after a restart of its
    engine; a salt of another tenant finds nothing. When the instance is gone, the answer is a
    404."""
    router, servers = cluster
    url = router.url + "/v1/responses"
    body: dict[str, Any] = {"input": "Hello there", "max_output_tokens": 8}
    stored = [ask("POST", url, {**body, "input": f"{n} is it"}) for n in range(6)]
    homes = {answer.json()["id"]: answer.headers[NAME] for answer in stored}
    assert len(set(homes.values())) == 2
    for response_id, home in homes.items():
        again = ask("POST", url, {**body, "previous_response_id": response_id})
        assert again.status_code == 200, again.text
        assert again.headers[NAME] == home
        read = ask("GET", f"{url}/{response_id}")
        assert read.json()["id"] == response_id
    victim, response_id = home_of(servers, stored[0]), stored[0].json()["id"]
    os.kill(victim.engine_pid, signal.SIGKILL)
    until_restarted(victim)
    again = ask("POST", url, {**body, "previous_response_id": response_id})
    assert again.status_code == 200, again.text
    assert again.headers[NAME] == name(victim)
    foreign = {**body, "previous_response_id": response_id, "cache_salt": "other"}
    refused = ask("POST", url, foreign)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    victim.process.kill()
    victim.wait()
    router.until(
        lambda known: name(victim) not in known or known[name(victim)]["state"] == "lost"
    )
    lost = httpx.get(f"{url}/{stored[0].json()['id']}", timeout=60)
    assert lost.status_code in (404, 503)
    made_up = ask("GET", f"{url}/resp_0123456789abcdef_00")
    assert made_up.status_code == 404
    assert made_up.json()["error"]["code"] == "previous_response_not_found"
