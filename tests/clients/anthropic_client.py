"""`anthropic`: create, a tool loop, count_tokens, the streaming helper, errors."""

import sys

import anthropic

MODEL = "headwater-tiny"
TOOLS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["city"],
        },
    }
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: changes with every request"},
    {
        "type": "text",
        "text": "You answer in few words. " * 20,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    },
]


def run(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages: list = [{"role": "user", "content": "What is the weather in Rome?"}]
    fields = {"model": MODEL, "max_tokens": 2000, "tools": TOOLS, "system": SYSTEM}
    counted = client.messages.count_tokens(
        model=MODEL, messages=messages, tools=TOOLS, system=SYSTEM
    )
    before = 0
    for turn in range(3):
        answer = client.messages.create(
            messages=messages, tool_choice={"type": "any"}, **fields
        )
        assert answer.stop_reason == "tool_use", answer
        usage = answer.usage
        prompt = (
            usage.input_tokens
            + usage.cache_read_input_tokens
            + usage.cache_creation_input_tokens
        )
        if turn == 0:
            assert prompt == counted.input_tokens
        assert usage.cache_read_input_tokens >= before - 64, (turn, usage, before)
        before = prompt + usage.output_tokens
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert all(call.input["city"] in ("Rome", "Paris") for call in calls)
        messages.append(
            {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in calls]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    named = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=messages[:1], tool_choice=named, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("input_json") > 2, kinds
    assert final.content[0].input["city"] in ("Rome", "Paris")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(
        model=MODEL, max_tokens=20, messages=messages[:1], thinking=thinking
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "thinking"
    assert final.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=messages[:1],
        stop_sequences=["a", "e", " ", "t", "\x01"],
    )
    assert stopped.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
    try:
        client.messages.create(model="other", max_tokens=1, messages=messages[:1])
    except anthropic.NotFoundError:
        return
    raise AssertionError("a model that is not served must be a 404")


if __name__ == "__main__":
    run(sys.argv[1])
