"""`openai-agents` over chat completions and over responses."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


async def loop(agent: Agent) -> None:
    """A tool call and its result, complete and streamed."""
    found = await Runner.run(agent, "What is the weather in Rome?")
    assert found.final_output.startswith("sunny in")
    result = Runner.run_streamed(agent, "What is the weather in Rome?")
    async for _ in result.stream_events():
        pass
    assert result.final_output.startswith("sunny in")


def run(url: str) -> None:
    set_tracing_disabled(True)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        client = AsyncOpenAI(base_url=url + "/v1", api_key="none")
        agent = Agent(
            name="weather",
            instructions="You tell the weather.",
            tools=[get_weather],
            model=kind(model="headwater-tiny", openai_client=client),
            model_settings=ModelSettings(tool_choice="required", max_tokens=1000),
            tool_use_behavior="stop_on_first_tool",
        )
        asyncio.run(loop(agent))


if __name__ == "__main__":
    run(sys.argv[1])
