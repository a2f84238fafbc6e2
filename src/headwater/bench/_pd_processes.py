"""One prefill and one decode instance against two mixed ones, on the same two cores."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from headwater.bench._client import connected
from headwater.disagg.routing import prefills_itself
from headwater.errors import EngineDead
from headwater.server.router.config import RouterConfig

_PINNED = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
_BLOCK_TOKENS = 64
_PARTS = ("start", "queue", "compute", "ask", "push", "first_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PDLoad:
    """The load: a number of clients, each with a number of conversations of two turns."""

    num_clients: int
    num_rounds: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PDInstance:
    """One server process."""

    port: int
    token: str

    def get(self, path: str) -> str:
        """The answer to a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            text: str = reply.read().decode()
            return text

    def value(self, name: str, labels: str = "") -> float:
        """One value of its metrics; 0 if it does not exist yet."""
        found = re.search(
            rf"^headwater:{name}{re.escape(labels)} (\S+)$", self.get("/metrics"), re.M
        )
        return float(found.group(1)) if found else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where a client sends requests, and how."""

    instance: PDInstance
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that name the instance that prefills."""

    always: bool = False
    """Whether even a prompt with few new tokens is handed off. A router would not do that."""

    def headers_for(self, num_new: int) -> dict[str, str]:
        """Headers for a prompt with this many tokens that the instance has not cached."""
        stays = prefills_itself(num_new, RouterConfig(is_insecure=True).prefill_threshold)
        return {} if stays and not self.always else self.headers


@dataclass(frozen=True, slots=True)
class Figures:
    """What clients measured."""

    first_s: list[float]
    gaps_s: list[float]
    """Seconds between tokens of one answer."""

    num_tokens: int
    seconds: float

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def itl_tail_s(self) -> float:
        """Mean of the slowest hundredth of the times between tokens. About a hundredth of the
        tokens wait for another request's prompt, so a single quantile at this share would vary
        between runs."""
        slowest = sorted(self.gaps_s)[-max(len(self.gaps_s) // 100, 1) :]
        return fmean(slowest)


def measure_pd(load: PDLoad, link: str, rounds: int) -> dict[str, Any]:
    """`pd_over_mixed`, `handoff_ms` and `second_turn_byte_share`.

    Every prompt is handed off; in `routed` the clients hand off only those that a router would.
    """
    with ExitStack() as stack:
        prefill, decode = stack.enter_context(_pair(link))
        mixed = stack.enter_context(_two_mixed())
        headers = {
            "x-headwater-prefill": json.loads(prefill.get("/server_info"))["engine"][
                "peer_address"
            ],
            "x-headwater-peer-token": decode.token,
        }
        senders: dict[str, list[Target]] = {
            "routed": [Target(decode, headers)],
            "pd": [Target(decode, headers, always=True)],
            "mixed": [Target(instance) for instance in mixed],
        }
        runs: dict[str, list[Figures]] = {way: [] for way in senders}
        handoffs = dict.fromkeys(("num", *_PARTS), 0.0)
        for number in range(rounds + 1):
            for way, targets in senders.items():
                before = _totals(decode)
                figures = asyncio.run(_ask(load, targets, seed=2 * number + (way != "routed")))
                if number:  # the first turn warms up
                    runs[way].append(figures)
                if number and way == "pd":
                    after = _totals(decode)
                    handoffs = {key: handoffs[key] + after[key] - before[key] for key in after}
        share = asyncio.run(_second_turn(decode, headers, load, 2 * rounds + 2))
    return {
        "pd_over_mixed": _over(runs["pd"], runs["mixed"]),
        "routed_over_mixed": _over(runs["routed"], runs["mixed"]),
        **{
            f"{way}_ttft_ms": 1e3 * median(at for run in figures for at in run.first_s)
            for way, figures in runs.items()
        },
        **{
            f"{way}_tokens_s": fmean(run.tokens_s for run in figures)
            for way, figures in runs.items()
        },
        **{
            f"{way}_itl_tail_ms": 1e3 * median(run.itl_tail_s for run in figures)
            for way, figures in runs.items()
        },
        "handoff_ms": {part: 1e3 * handoffs[part] / handoffs["num"] for part in _PARTS},
        "second_turn_byte_share": share,
    }


def _over(ours: Sequence[Figures], theirs: Sequence[Figures]) -> dict[str, float]:
    """Ratios of time to first token, tokens per second and the slowest hundredth of times
    between tokens. Each turn is divided by the turn beside it; the result is the median."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "ttft": median(median(a.first_s) / median(b.first_s) for a, b in pairs),
        "throughput": median(a.tokens_s / b.tokens_s for a, b in pairs),
        "itl_tail": median(a.itl_tail_s / b.itl_tail_s for a, b in pairs),
    }


def _totals(decode: PDInstance) -> dict[str, float]:
    """Seconds of all hand-offs so far by part, and their number."""
    seconds = {
        part: decode.value("pd_handoff_seconds_total", f'{{part="{part}"}}') for part in _PARTS
    }
    return {"num": decode.value("pd_handoffs_total", '{side="decode"}'), **seconds}


async def _ask(load: PDLoad, targets: Sequence[Target], seed: int) -> Figures:
    """All clients at once, distributed over `targets`; a conversation stays on one target."""
    began_s = time.perf_counter()
    clients = (
        _client(load, targets[number % len(targets)], seed * 1000 + number)
        for number in range(load.num_clients)
    )
    answered = await asyncio.gather(*clients)
    seconds = time.perf_counter() - began_s
    first_s = [at for felt in answered for at in felt.first_s]
    gaps_s = [gap for felt in answered for gap in felt.gaps_s]
    return Figures(first_s, gaps_s, sum(felt.num_tokens for felt in answered), seconds)


async def _client(load: PDLoad, target: Target, seed: int) -> Figures:
    """Conversations of two turns, one after the other."""
    chance = np.random.default_rng(seed)
    began_s = time.perf_counter()
    first_s: list[float] = []
    gaps_s: list[float] = []
    num_tokens = 0
    async with connected(target.instance.port) as connection:
        for _ in range(load.num_rounds):
            prompt = chance.integers(0, 256, load.prompt_tokens).tolist()
            num_known = 0
            for _ in range(2):
                headers = target.headers_for(len(prompt) - num_known)
                answer = await connection.ask(_body(prompt, load.output_tokens), headers)
                times_s = answer.event_times_s()
                first_s.append(times_s[0] - answer.began_s)
                gaps_s += [after - before for before, after in pairwise(times_s)]
                tokens = answer.token_ids()
                num_tokens += len(tokens)
                num_known = (len(prompt) + len(tokens) - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
                prompt = prompt + tokens + chance.integers(0, 256, 32).tolist()
    return Figures(first_s, gaps_s, num_tokens, time.perf_counter() - began_s)


async def _second_turn(
    decode: PDInstance, headers: dict[str, str], load: PDLoad, seed: int
) -> float:
    """Bytes that a second turn transfers, divided by those of its whole prompt."""
    chance = np.random.default_rng(seed)
    prompt = chance.integers(0, 256, load.prompt_tokens).tolist()
    moved: list[float] = []
    lengths: list[int] = []
    async with connected(decode.port) as connection:
        for _ in range(2):
            before = decode.value("pd_bytes_total", '{side="decode"}')
            answer = await connection.ask(_body(prompt, load.output_tokens), headers)
            moved.append(decode.value("pd_bytes_total", '{side="decode"}') - before)
            lengths.append(-(-len(prompt) // _BLOCK_TOKENS))
            prompt = prompt + answer.token_ids() + chance.integers(0, 256, 32).tolist()
    block_bytes = moved[0] / lengths[0]
    return moved[1] / (lengths[1] * block_bytes)


def _body(prompt: list[int], output_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@contextmanager
def _pair(link: str) -> Iterator[tuple[PDInstance, PDInstance]]:
    """A prefill instance on the first core, a decode instance on the second."""
    token = secrets.token_hex(16)
    flags = ["--cache-transfer-protocol", link]
    with (
        _serving(0, token, ["--splitwise-role", "prefill", *flags]) as prefill,
        _serving(1, token, ["--splitwise-role", "decode", *flags]) as decode,
    ):
        yield prefill, decode


@contextmanager
def _two_mixed() -> Iterator[tuple[PDInstance, PDInstance]]:
    with _serving(0, "", []) as first, _serving(1, "", []) as second:
        yield first, second


@contextmanager
def _serving(place: int, token: str, flags: list[str]) -> Iterator[PDInstance]:
    """One server on one core, until the end of the `with` statement."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--threads", "1"]
    command += ["--num-gpu-blocks-override", "2048", *flags]
    pinned = [sys.executable, "-c", _PINNED, str(cores[place % len(cores)]), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if token:
        environment["HEADWATER_PEER_TOKEN"] = token
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            pinned, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield PDInstance(_port(process), token)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _port(process: "subprocess.Popen[str]") -> int:
    """The port of a server; waits until the server announces it."""
    port = 0
    for line in process.stdout or ():
        if found := re.search(r"is ready at http://\S+:(\d+)", line):
            port = int(found.group(1))
        if line.startswith("stop with"):
            return port
    raise EngineDead("a server of the benchmark did not start")
