"""`langchain-openai` with a tool-calling agent of `langchain`."""

import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class Animal(BaseModel):
    kind: Literal["cat", "dog"]


@wrap_model_call
def call_once(request, handler):
    """The first turn must call the tool, the second must not."""
    is_first = not any(isinstance(message, ToolMessage) for message in request.messages)
    request.tool_choice = "get_weather" if is_first else "none"
    return handler(request)


def run(url: str) -> None:
    model = ChatOpenAI(
        base_url=url + "/v1", api_key="none", model="headwater-tiny", max_tokens=300
    )
    bound = model.bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke([HumanMessage("What is the weather in Rome?")])
    assert answer.tool_calls[0]["args"]["city"] in ("Rome", "Paris")
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0
    whole, num_pieces = None, 0
    for chunk in bound.stream([HumanMessage("What is the weather in Rome?")]):
        whole = chunk if whole is None else whole + chunk
        num_pieces += len(chunk.tool_call_chunks)
    assert whole.tool_calls[0]["name"] == "get_weather"
    assert whole.tool_calls[0]["args"]["city"] in ("Rome", "Paris")
    assert num_pieces > 2
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Animal, method=method).invoke("Which?")
        assert found.kind in ("cat", "dog")
    agent = create_agent(model, [get_weather], middleware=[call_once])
    messages = agent.invoke({"messages": [HumanMessage("Weather?")]})["messages"]
    assert [type(message) for message in messages] == [
        HumanMessage,
        AIMessage,
        ToolMessage,
        AIMessage,
    ]
    assert messages[2].content.startswith("sunny in")


if __name__ == "__main__":
    run(sys.argv[1])
