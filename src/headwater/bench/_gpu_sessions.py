"""Sessions of several turns over HTTP that do not fit on the device: one server with a host tier
and one without, load on one at a time, in alternating rounds.

What a turn could find is everything before its new tokens: the previous prompt and its answer.
"""

import asyncio
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from headwater.bench._client import BenchConnection, connected
from headwater.bench._gpu_http import ServedModel, serving
from headwater.bench._server_processes import RunningServer
from headwater.clock import SystemClock

_COMPUTED = r'headwater:prompt_tokens_computed_total\{.*reason="(\w+)".*\}'

_VOCAB = 256
"""Prompts are token ids below this, which every model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The sessions of a round, and the sizes of the tiers."""

    sessions: int = 64
    turns: int = 4
    first: int = 4000
    """Prompt tokens of the first turn."""

    added: int = 500
    """New prompt tokens of each later turn."""

    output: int = 64
    clients: int = 16
    rounds: int = 3
    flags: tuple[str, ...] = ("--num-gpu-blocks-override", "1500")
    host_gib: float = 48

    def possible(self, turn: int) -> float:
        """The share of a prompt that could be found in turn 2, 3, …"""
        before = self.first + (turn - 2) * self.added + (turn - 1) * self.output
        return before / (before + self.added)


_SMALL = SessionSpec(
    sessions=4,
    turns=3,
    first=200,
    added=100,
    output=4,
    clients=2,
    rounds=1,
    flags=("--num-gpu-blocks-override", "48", "--max-model-len", "512", "--block-size", "16"),
    host_gib=0.0625,
)


def spec_for(device: str, *, rounds: int) -> SessionSpec:
    """The documented sessions on a GPU, one round of small ones on a CPU."""
    return _SMALL if device == "cpu" else SessionSpec(rounds=rounds)


def measure_sessions(served: ServedModel, spec: SessionSpec, found: dict[str, Any]) -> None:
    """Measure the cached share of each turn, the time of all turns after the first, and why
    tokens were computed, by round."""
    turns = range(2, spec.turns + 1)
    found["possible"] = [spec.possible(turn) for turn in turns]
    found["rounds"] = []
    with ExitStack() as stack:
        servers: dict[str, RunningServer] = {}
        for name, gib in (("with_host", spec.host_gib), ("without_host", 0)):
            server = serving(served, *spec.flags, "--swap-space", str(gib))
            servers[name] = stack.enter_context(server)[0]
        for number in range(spec.rounds):
            found["rounds"].append(
                {
                    name: _measure_round(server, spec, seed=number)
                    for name, server in servers.items()
                }
            )
    found |= summarise(found)


def summarise(found: Mapping[str, Any]) -> dict[str, Any]:
    """The lowest share of what was possible with a host tier, and the time of turns 2 and later
    as a share of the time without one."""
    rounds = found["rounds"]
    ratios = [
        sum(each["with_host"]["turn_s"][1:]) / sum(each["without_host"]["turn_s"][1:])
        for each in rounds
    ]
    least = min(
        cached / possible
        for each in rounds
        for cached, possible in zip(
            each["with_host"]["cached"][1:], found["possible"], strict=True
        )
    )
    return {
        "least_of_possible": least,
        "time_ratio": median(ratios),
        "time_ratio_highest": max(ratios),
        "time_ratios": ratios,
    }


def _measure_round(server: RunningServer, spec: SessionSpec, *, seed: int) -> dict[str, Any]:
    """The figures of `_serve_round`, and the computed tokens by reason."""
    before = _computed(server)
    result: dict[str, Any] = asyncio.run(_serve_round(server.port, spec, seed=seed))
    after = _computed(server)
    result["computed"] = {why: count - before.get(why, 0) for why, count in after.items()}
    return result


def _computed(server: RunningServer) -> dict[str, float]:
    """Prompt tokens that a server has computed, by reason."""
    counters = server.counters().items()
    reasons = ((re.fullmatch(_COMPUTED, name), count) for name, count in counters)
    return {match[1]: count for match, count in reasons if match is not None and count}


async def _serve_round(port: int, spec: SessionSpec, *, seed: int) -> dict[str, list[float]]:
    """All turns of all sessions: by turn the cached share of the prompts, the median time to
    the first token, and the seconds it took."""
    random, clock = np.random.default_rng(seed), SystemClock()
    prompts = [_tokens(random, spec.first) for _ in range(spec.sessions)]
    result: dict[str, list[float]] = {"cached": [], "first_token_p50_ms": [], "turn_s": []}
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(connected(port)) for _ in range(spec.clients)
        ]
        for _ in range(spec.turns):
            began_s = clock.now()
            cached, first_s = await _serve_turn(connections, prompts, spec, random)
            result["turn_s"].append(clock.now() - began_s)
            result["cached"].append(cached)
            result["first_token_p50_ms"].append(median(first_s) * 1e3)
    return result


async def _serve_turn(
    connections: list[BenchConnection],
    prompts: list[list[int]],
    spec: SessionSpec,
    random: np.random.Generator,
) -> tuple[float, list[float]]:
    """One turn of each session, in random order. Returns the mean cached share of the prompts
    and the seconds to each first token, and extends the prompts for the next turn."""
    waiting = random.permutation(len(prompts)).tolist()
    added = [_tokens(random, spec.added) for _ in prompts]
    shares, first_s = list[float](), list[float]()

    async def client(connection: BenchConnection) -> None:
        while waiting:
            number = waiting.pop()
            body = {
                "model": "bench", "prompt": prompts[number], "max_tokens": spec.output,
                "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
                "temperature": 0, "return_token_ids": True,
            }  # fmt: skip
            answer = await connection.ask(body)
            usage = answer.usage()
            details = usage["prompt_tokens_details"] or {}
            shares.append((details.get("cached_tokens") or 0) / usage["prompt_tokens"])
            first_s.append(answer.event_times_s()[0] - answer.began_s)
            prompts[number] += answer.token_ids() + added[number]

    await asyncio.gather(*map(client, connections))
    return sum(shares) / len(shares), first_s


def _tokens(random: np.random.Generator, count: int) -> list[int]:
    tokens: list[int] = random.integers(0, _VOCAB, count).tolist()
    return tokens
