"""The workloads of `bench serve`: conversations of token ids, sent by several clients at
once."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.bench._client import Answer, connected

_PREFIX_TOKENS = 512
"""Length of the common beginning: worth caching, but short enough for one core."""

_FIRST_TOKEN, _LAST_TOKEN = 300, 31_000
_OWN_TOKENS = 32
_TURNS = 3

_PERSONS: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,  # too long for any answer, so each answer ends at its token limit
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {
                "type": "array",
                "items": {"type": "string", "maxLength": 8},
                "maxItems": 3,
            },
            "owner": {"type": ["string", "null"], "maxLength": 12},
        },
        "required": ["name", "age", "kind", "tags", "owner"],
        "additionalProperties": False,
    },
}
"""The schema of the `json` workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConversation:
    """Turns of one client; each is sent when the previous one is answered."""

    opening: list[int]
    turns: list[list[int]]
    """Tokens appended to the conversation; then the model continues."""

    output_tokens: int
    schema: dict[str, Any] | None = None
    """The constraint on the answers; None means no constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLoad:
    """Conversations that are measured, and warm-up conversations that run before them."""

    name: str
    conversations: list[BenchConversation]
    before: list[BenchConversation] = field(default_factory=list)


def make_workload(
    name: str, *, concurrency: int, vocab: int, seed: int, output_tokens: int
) -> ConversationLoad:
    """One of `WORKLOADS`. Another seed has no prefix in common with this one."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        # Ids below or above the special tokens of the byte-level tokenizer.
        span = (0, 256) if vocab <= _LAST_TOKEN else (_FIRST_TOKEN, _LAST_TOKEN)
        return [int(token) for token in random.integers(*span, count)]

    prefix = tokens(_PREFIX_TOKENS)

    def talk(turns: Sequence[list[int]]) -> BenchConversation:
        return BenchConversation(
            opening=prefix,
            turns=list(turns),
            output_tokens=output_tokens,
            schema=_PERSONS if name == JSON else None,
        )

    if name == "full-hit":
        same = talk([tokens(1)])
        return ConversationLoad(
            name=name, conversations=[same] * max(6, 2 * concurrency), before=[same]
        )
    if name == "multi-turn":
        talks = [
            talk([tokens(_OWN_TOKENS) for _ in range(_TURNS)])
            for _ in range(max(2, concurrency))
        ]
        return ConversationLoad(name=name, conversations=talks)
    talks = [talk([tokens(_OWN_TOKENS)]) for _ in range(max(6, 2 * concurrency))]
    return ConversationLoad(name=name, conversations=talks)


JSON, FREE = "json", "json-free"
"""Workloads with the same prompts: answers follow a schema in the first, and not in the
second."""

WORKLOADS = ("shared-prefix", "multi-turn", "full-hit", JSON)


async def run_conversations(
    workload: ConversationLoad, *, port: int, model: str, concurrency: int
) -> list[Answer]:
    """All answers; each of `concurrency` clients takes the next conversation when it has
    finished one."""
    waiting = deque(workload.before)
    await _send_all(waiting, port, model, 1)
    waiting = deque(workload.conversations)
    return await _send_all(waiting, port, model, concurrency)


async def _send_all(
    waiting: deque[BenchConversation], port: int, model: str, clients: int
) -> list[Answer]:
    async def client() -> list[Answer]:
        answers: list[Answer] = []
        async with connected(port) as connection:
            while waiting:
                talk = waiting.popleft()
                history = list(talk.opening)
                for turn in talk.turns:
                    history += turn
                    body = _body(history, model, talk)
                    answers.append(await connection.ask(body))
                    if len(talk.turns) > 1:
                        history += answers[-1].token_ids()
        return answers

    done = await asyncio.gather(*(client() for _ in range(clients)))
    return [answer for answers in done for answer in answers]


def _body(history: list[int], model: str, talk: BenchConversation) -> dict[str, Any]:
    wanted = {} if talk.schema is None else {"structured_outputs": {"json": talk.schema}}
    return {
        **wanted,
        "model": model,
        "prompt": history,
        "max_tokens": talk.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": len(talk.turns) > 1,
    }
