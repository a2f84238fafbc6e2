"""`pydantic-ai` over chat completions and over responses."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: Literal["Rome", "Paris"]


def run(url: str) -> None:
    provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind("headwater-tiny", provider=provider), output_type=City)
        found = agent.run_sync("Which city?")
        assert found.output.city in ("Rome", "Paris")
        again = agent.run_sync("And now?", message_history=found.all_messages())
        assert again.usage.cache_read_tokens > 0


if __name__ == "__main__":
    run(sys.argv[1])
