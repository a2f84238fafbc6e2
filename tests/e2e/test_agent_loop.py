"""An agent's loop of 20 tool turns: its history hits the cache, in all three APIs."""

from typing import Any

import pytest

from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow

NUM_TURNS = 20
LEAST_SHARE = 0.98
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
}
NAMES = [f"tool_{number}" for number in range(12)]
ABOUT = "Tells the weather of a city for one day of the year. " * 2
SYSTEM = "You are an agent that answers with tool calls. " * 34
MODEL = "headwater-tiny"
NEW = len("sunny") + 3
"""Tokens of a result in the built-in template: the text, the two tags around the text, and the
first tag of the next turn."""


@pytest.fixture(scope="module")
def server():
    server = LiveServer("--max-model-len", "16384", blocks=512).wait_ready()
    yield server
    assert server.stop() == 0, server.errors


class Shares:
    """For each turn: the share of the prompt before the new messages that was cached."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.prompts: list[int] = []

    def add(self, prompt_tokens: int, cached_tokens: int, num_results: int) -> None:
        self.prompts.append(prompt_tokens)
        if num_results:
            before = prompt_tokens - (num_results * (NEW - 1) + 1)
            self.found.append(cached_tokens / before)

    def check(self) -> None:
        assert self.prompts[0] >= 4000
        assert len(self.found) == NUM_TURNS - 1
        assert min(self.found) >= LEAST_SHARE, self.found


def post(server: LiveServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, {"model": MODEL, "seed": 5, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_chat_completions(server):
    """Calls and results in the history have the tokens that were generated and read."""
    tools = [
        {"type": "function", "function": {"name": n, "description": ABOUT, "parameters": CITY}}
        for n in NAMES
    ]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Weather?"},
    ]
    shares, results = Shares(), 0
    for _ in range(NUM_TURNS):
        body = {"messages": messages, "tools": tools, "tool_choice": "required"}
        answer = post(server, "/v1/chat/completions", {**body, "max_tokens": 1000})
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        shares.add(usage["prompt_tokens"], cached, results)
        message = answer["choices"][0]["message"]
        messages.append(message)
        calls = message["tool_calls"]
        results = len(calls)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls
        ]
    shares.check()


def test_responses(server):
    """The history hits the cache with stored turns, too, where a request has only the new
    part."""
    tools = [
        {"type": "function", "name": n, "description": ABOUT, "parameters": CITY} for n in NAMES
    ]
    items: Any = "Weather, please?"
    shares, results, previous = Shares(), 0, None
    for _ in range(NUM_TURNS):
        body = {"input": items, "instructions": SYSTEM, "previous_response_id": previous}
        more = {"tools": tools, "tool_choice": "required", "max_output_tokens": 1000}
        answer = post(server, "/v1/responses", {**body, **more})
        usage = answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        shares.add(usage["input_tokens"], cached, results)
        previous, results = answer["id"], len(answer["output"])
        items = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in answer["output"]
        ]
    shares.check()


def test_messages(server):
    """The history hits the cache in Anthropic's format, too."""
    tools = [{"name": n, "description": ABOUT, "input_schema": CITY} for n in NAMES]
    messages: list[Any] = [{"role": "user", "content": "What weather?"}]
    shares, results = Shares(), 0
    for _ in range(NUM_TURNS):
        body = {"messages": messages, "system": SYSTEM, "tools": tools, "max_tokens": 1000}
        answer = post(server, "/v1/messages", {**body, "tool_choice": {"type": "any"}})
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        fresh = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        shares.add(cached + fresh, cached, results)
        messages.append({"role": "assistant", "content": answer["content"]})
        results = len(answer["content"])
        content = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
            for block in answer["content"]
        ]
        messages.append({"role": "user", "content": content})
    shares.check()
