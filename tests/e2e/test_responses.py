"""/v1/responses with the real `openai` client: stored turns, streams, cached tokens."""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

MODEL = "headwater-tiny"
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
INSTRUCTIONS = "You answer in few words. " * 10


class Animal(BaseModel):
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        yield client


def test_a_stored_conversation_continues_and_finds_its_prefix(client):
    """Each turn sends only what is new; the server adds the rest, which hits the cache."""
    before, previous = 0, None
    items: Any = "What is the weather in Rome?"
    for _ in range(4):
        with client.responses.stream(
            model=MODEL,
            input=items,
            instructions=INSTRUCTIONS,
            tools=TOOLS,
            tool_choice="required",
            max_output_tokens=600,
            **({} if previous is None else {"previous_response_id": previous}),
        ) as stream:
            kinds = [event.type for event in stream]
            answer = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert answer.usage.input_tokens_details.cached_tokens >= before - 64
        before = answer.usage.total_tokens
        previous = answer.id
        items = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in answer.output
        ]
    assert client.responses.retrieve(previous).output[0].name == "get_weather"
    client.responses.delete(previous)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(previous)


def test_a_response_that_is_not_stored_is_a_404(client):
    """The answer is a 404 with `store` false, for another tenant, and for a response that was
    never created."""
    fields = {"model": MODEL, "input": "x", "max_output_tokens": 4}
    hidden = client.responses.create(**fields, store=False)
    red = client.responses.create(**fields, extra_body={"cache_salt": "red"})
    for name in (hidden.id, red.id, "resp_a_b"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(**fields, previous_response_id=name)
        assert missing.value.code == "previous_response_not_found"
    again = client.responses.create(
        **fields, previous_response_id=red.id, extra_body={"cache_salt": "red"}
    )
    assert again.status in ("completed", "incomplete")


def test_a_stream_is_the_whole_answer(client):
    """A stream has the items of the whole answer with the same text; reasoning is a separate
    item."""
    fields = {"model": MODEL, "input": "Hello", "max_output_tokens": 24}
    for extra in ({"seed": 7}, {"seed": 7, "chat_template_kwargs": {"enable_thinking": True}}):
        whole = client.responses.create(**fields, extra_body=extra)
        with client.responses.stream(**fields, extra_body=extra) as stream:
            last = list(stream)[-1]
        assert last.type == "response.incomplete"
        streamed = last.response
        assert [i.model_dump(exclude={"id"}) for i in streamed.output] == [
            i.model_dump(exclude={"id"}) for i in whole.output
        ]
        assert whole.status == streamed.status == "incomplete"
    assert whole.output[0].type == "reasoning"
    assert whole.usage.output_tokens_details.reasoning_tokens == 24


def test_parse_gives_the_clients_own_type(client):
    """`text.format` comes from a pydantic class."""
    found = client.responses.parse(
        model=MODEL, input="Which?", text_format=Animal, max_output_tokens=400
    )
    assert found.output_parsed.kind in ("cat", "dog")
