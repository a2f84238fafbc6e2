"""POST /v1/messages and count_tokens over an echo engine."""

import json
from typing import Any

from tests.server.harness import run

TEXT = "A long beginning that fills more than one block of the cache, and a question."
BODY = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 20, "seed": 3}


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_three_kinds_of_input_tokens_add_up_to_the_prompt():
    """At first tokens are computed and kept, the second time they are read from the cache;
    count_tokens gives the sum in advance."""

    async def scenario(harness):
        asked = {"messages": BODY["messages"], "system": "Be brief."}
        count = (await harness.post("/v1/messages/count_tokens", asked)).json()["input_tokens"]
        for is_first in (True, False):
            body = BODY | {"system": "Be brief."}
            usage = (await harness.post("/v1/messages", body)).json()["usage"]
            read_tokens = usage["cache_read_input_tokens"]
            created = usage["cache_creation_input_tokens"]
            assert usage["input_tokens"] + read_tokens + created == count
            assert (read_tokens == 0) is is_first
            assert (created > 0) is is_first
            assert usage["output_tokens"] == 20

    run(scenario)


def test_a_stream_is_the_whole_message():
    """A stream has one text block, whose joined deltas are the text; usage and the reason come
    last."""

    async def scenario(harness):
        whole = (await harness.post("/v1/messages", BODY)).json()
        events = read((await harness.post("/v1/messages", BODY | {"stream": True})).text)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
        assert events[-2]["usage"]["output_tokens"] == 20

    run(scenario)


def test_errors_have_anthropics_form():
    """Errors before the body is read have Anthropic's form too."""

    async def scenario(harness):
        for body, kind, status in (
            ({"messages": BODY["messages"]}, "invalid_request_error", 400),
            (BODY | {"model": "other"}, "not_found_error", 404),
        ):
            answer = await harness.post("/v1/messages", body)
            assert answer.status_code == status
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == kind

    run(scenario)
