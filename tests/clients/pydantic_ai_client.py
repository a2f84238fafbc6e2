"""`pydantic-ai` over chat completions and over responses."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: Literal["Rome", "Paris"]


async def stream(agent: Agent) -> City:
    """The city from a streamed answer, which is a tool call."""
    async with agent.run_stream("Which city?") as result:
        return await result.get_output()


def run(url: str) -> None:
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind("headwater-tiny", provider=provider), output_type=City)
        found = agent.run_sync("Which city?")
        assert found.output.city in ("Rome", "Paris")
        again = agent.run_sync("And now?", message_history=found.all_messages())
        assert again.usage.cache_read_tokens > 0
        assert asyncio.run(stream(agent)).city in ("Rome", "Paris")


if __name__ == "__main__":
    run(sys.argv[1])
