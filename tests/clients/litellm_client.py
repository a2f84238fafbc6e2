"""`litellm` through both of its protocols."""

import json
import sys

import litellm

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def run(url: str) -> None:
    for model, base in (
        ("openai/headwater-tiny", url + "/v1"),
        ("anthropic/headwater-tiny", url),
    ):
        messages: list = [{"role": "user", "content": "What is the weather in Rome?"}]
        for _ in range(2):
            answer = litellm.completion(
                model=model,
                api_base=base,
                api_key="none",
                messages=messages,
                tools=TOOLS,
                tool_choice="required",
                max_tokens=1000,
            )
            message = answer.choices[0].message
            assert message.tool_calls, (model, answer)
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
                for call in message.tool_calls
            ]
        streamed = litellm.completion(
            model=model,
            api_base=base,
            api_key="none",
            messages=messages[:1],
            tools=TOOLS,
            tool_choice="required",
            max_tokens=1000,
            stream=True,
        )
        built = litellm.stream_chunk_builder(list(streamed), messages=messages[:1])
        function = built.choices[0].message.tool_calls[0].function
        assert json.loads(function.arguments)["city"] in ("Rome", "Paris")


if __name__ == "__main__":
    run(sys.argv[1])
