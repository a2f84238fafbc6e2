"""Tool calls in streams: their arguments arrive as the model writes them, in all three APIs."""

import json
from typing import Any

import pytest

from headwater.server.continuation import HEADER
from headwater.server.router.stream_progress import StreamProgress
from headwater.testing.engines import ScriptedEngine
from tests.server.harness import Harness, run

ARGUMENTS = '{"path": "a.txt", "text": "some \\"long\\" text"}'
CALL = f'<tool_call>\n{{"name": "write_file", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"I write it.\n{CALL}\n{CALL}\nWritten."
CUT = CALL[: CALL.index(" text")]
"""A call that ends inside a string of its arguments."""

DAMAGED = CALL.replace("}}", "]}}")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "Write."}],
        "tools": [
            {"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}}
        ],
        "max_tokens": 400,
    },
    MESSAGES: {
        "messages": [{"role": "user", "content": "Write."}],
        "tools": [{"name": "write_file", "input_schema": SCHEMA}],
        "max_tokens": 400,
    },
    RESPONSES: {
        "input": "Write.",
        "tools": [{"type": "function", "name": "write_file", "parameters": SCHEMA}],
        "max_output_tokens": 400,
    },
}


def serve(text: str, scenario: Any) -> None:
    """Run `scenario(harness)` against a model that always answers `text`."""
    run(scenario, engine=ScriptedEngine(text), tool_call_parser="hermes")


async def whole(harness: Harness, path: str) -> dict[str, Any]:
    answer = await harness.post(path, BODIES[path])
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(harness: Harness, path: str) -> list[dict[str, Any]]:
    answer = await harness.post(path, BODIES[path] | {"stream": True})
    return read(answer.text)


def read(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_chat_sends_the_name_and_then_pieces_of_the_arguments():
    """Id, type and name come once; the pieces join to the arguments of the whole answer."""

    async def scenario(harness):
        message = (await whole(harness, CHAT))["choices"][0]["message"]
        chunks = await stream(harness, CHAT)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        for index, call in enumerate(message["tool_calls"]):
            first, *pieces = [found for found in calls if found["index"] == index]
            assert first["function"]["name"] == "write_file"
            assert first["type"] == "function"
            assert len(first["id"]) == len(call["id"])
            assert len(pieces) >= 30
            assert all(set(piece) == {"index", "function"} for piece in pieces)
            texts = [found["function"]["arguments"] for found in (first, *pieces)]
            assert "".join(texts) == call["function"]["arguments"] == ARGUMENTS
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert not any("malformed_tool_calls" in delta for delta in deltas)

    serve(ANSWER, scenario)


def test_messages_sends_pieces_of_the_input():
    """Each call is one block, opened before its first piece and closed before the next
    block."""

    async def scenario(harness):
        blocks = (await whole(harness, MESSAGES))["content"]
        events = await stream(harness, MESSAGES)
        shown: list[Any] = []
        for event in events:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(shown)
                    shown.append((event["content_block"], []))
                case "content_block_delta":
                    assert event["index"] == len(shown) - 1
                    shown[-1][1].append(event["delta"])
        assert [block["type"] for block, _ in shown] == ["text", "tool_use", "tool_use", "text"]
        for block, pieces in shown[1:3]:
            assert block["name"] == "write_file"
            assert len(pieces) >= 30
            text = "".join(piece["partial_json"] for piece in pieces)
            assert text == ARGUMENTS
            assert json.loads(text) == blocks[1]["input"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"

    serve(ANSWER, scenario)


def test_responses_sends_pieces_of_the_arguments():
    """Items are in the order of the answer, and are the same as in the last event."""

    async def scenario(harness):
        events = await stream(harness, RESPONSES)
        last = events[-1]["response"]
        kinds = [item["type"] for item in last["output"]]
        assert kinds == ["message", "function_call", "function_call", "message"]
        for index in (1, 2):
            mine = [event for event in events if event.get("output_index") == index]
            pieces = [event["delta"] for event in mine if event["type"].endswith(".delta")]
            assert len(pieces) >= 30
            assert "".join(pieces) == last["output"][index]["arguments"] == ARGUMENTS
            assert mine[0]["item"]["status"] == "in_progress"
            assert mine[0]["item"]["arguments"] == ""
            assert mine[-2]["type"] == "response.function_call_arguments.done"
            assert mine[-1]["item"] == last["output"][index]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))

    serve(ANSWER, scenario)


@pytest.mark.parametrize("text", [CUT, DAMAGED])
def test_an_incomplete_call_is_flagged(text):
    """A whole answer has the text of the incomplete call. A stream has sent a part of the call
    and says so at its end."""

    async def scenario(harness):
        body = await whole(harness, CHAT)
        assert body["choices"][0]["message"]["content"] == text
        assert body["choices"][0]["message"]["malformed_tool_calls"] == 1
        assert body["choices"][0]["finish_reason"] == "stop"
        last = (await stream(harness, CHAT))[-1]["choices"][0]
        assert last["delta"]["malformed_tool_calls"] == 1
        assert last["finish_reason"] == "stop"

        body = await whole(harness, MESSAGES)
        assert body["content"] == [{"type": "text", "text": text}]
        assert (body["malformed_tool_calls"], body["stop_reason"]) == (1, "end_turn")
        events = await stream(harness, MESSAGES)
        assert events[-3]["type"] == "content_block_stop"
        assert events[-2]["delta"]["malformed_tool_calls"] == 1
        assert events[-2]["delta"]["stop_reason"] == "end_turn"

        body = await whole(harness, RESPONSES)
        assert body["output"][0]["content"][0]["text"] == text
        assert body["malformed_tool_calls"] == 1
        last = (await stream(harness, RESPONSES))[-1]["response"]
        assert last["malformed_tool_calls"] == 1
        assert [item["status"] for item in last["output"]] == ["incomplete"]

    serve(text, scenario)


@pytest.mark.parametrize("path", BODIES)
def test_another_instance_continues_inside_a_call(path):
    """After any token, the events of both instances together are those of one."""

    async def scenario(harness):
        body = BODIES[path] | {"stream": True, "request_id": "abc"}
        answer = await harness.post(path, body, headers={HEADER: "1"})
        pieces = [piece + b"\n\n" for piece in answer.content.split(b"\n\n")[:-1]]
        events = read(answer.text)
        for event in events:
            drop_varying(event)
        for place in range(3, len(pieces) - 1, 13):
            progress = StreamProgress()
            before = progress.strip(b"".join(pieces[:place]))
            if progress.is_whole:
                break
            raw = progress.body(json.dumps(body).encode())
            rest = await harness.post(path, json.loads(raw))
            both = read(before.decode()) + read(rest.text)
            numbers = [event.get("sequence_number", at) for at, event in enumerate(both)]
            assert numbers == sorted(set(numbers))
            for event in both:
                drop_varying(event)
            assert both == events
        assert place > 100

    serve(ANSWER, scenario)


def drop_varying(event: dict[str, Any]) -> None:
    """Usage and times differ from request to request; numbers of events may have gaps."""
    event.pop("sequence_number", None)
    for place in (event, event.get("message"), event.get("response")):
        if isinstance(place, dict):
            for name in ("usage", "created", "created_at"):
                place.pop(name, None)
