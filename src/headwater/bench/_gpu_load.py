"""Closed-loop clients of a server, in separate processes: `python -m
headwater.bench._gpu_load`.

Each process reads one JSON object from standard input, says that it is ready, and begins when its
input ends, so all begin together. It writes one JSON object to standard output. Each connection
sends a request as soon as the previous answer has ended.
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from headwater.bench._client import Answer, connected
from headwater.clock import SystemClock
from headwater.errors import EngineDead

_READY = b"ready\n"
_VOCAB = 256
"""Prompts are token ids below this, which every model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """The requests of the clients."""

    port: int
    clients: int
    requests: int
    prompt: int
    output: int
    shared: int = 0
    """Leading prompt tokens that all requests have in common."""

    seed: int = 0
    processes: int = 4
    params: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request."""


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """The results of some requests."""

    seconds: float
    tokens: int
    first_s: list[float]
    events_s: list[list[float]]
    """The times of the events of each answer, on one clock."""

    def summary(self) -> dict[str, float]:
        """Rates and percentiles."""
        gaps_s = [
            later - earlier for times in self.events_s for earlier, later in pairwise(times)
        ]
        first, gaps = np.array(self.first_s) * 1e3, np.array(gaps_s or [0.0]) * 1e3
        return {
            "tokens_s": self.tokens / self.seconds,
            "events_s": len(gaps_s) / self.seconds,
            "events_of_tokens": len(gaps_s) / max(self.tokens - len(self.first_s), 1),
            "first_token_p50_ms": float(np.percentile(first, 50)),
            "first_token_p99_ms": float(np.percentile(first, 99)),
            "itl_p50_ms": float(np.percentile(gaps, 50)),
            "itl_p99_ms": float(np.percentile(gaps, 99)),
            "seconds": self.seconds,
        }

    def summary_together(self) -> dict[str, float]:
        """Percentiles of the times between events while every request was decoding."""
        began_s = max(times[0] for times in self.events_s)
        ended_s = min(times[-1] for times in self.events_s)
        gaps = [
            (later - earlier) * 1e3
            for times in self.events_s
            for earlier, later in pairwise(times)
            if began_s <= earlier and later <= ended_s
        ]
        if not gaps:
            raise EngineDead("the requests were never all decoding at the same time")
        p50, p99 = (float(np.percentile(gaps, which)) for which in (50, 99))
        return {
            "itl_p50_ms": p50,
            "itl_p99_ms": p99,
            "p99_of_p50": p99 / p50,
            "gaps": len(gaps),
        }


def run_load(spec: LoadSpec) -> LoadResult:
    """Send the requests of `spec`, with the given number of processes."""
    share = spec.processes
    parts = [
        replace(
            spec,
            clients=spec.clients // share,
            requests=spec.requests // share,
            seed=spec.seed * 1000 + number,
        )
        for number in range(share)
    ]
    command = [sys.executable, "-m", "headwater.bench._gpu_load"]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in parts
    ]
    inputs, outputs = (
        [getattr(process, name) for process in running] for name in ("stdin", "stdout")
    )
    for stdin, part in zip(inputs, parts, strict=True):
        stdin.write(json.dumps(asdict(part)).encode() + b"\n")
        stdin.flush()
    for stdout in outputs:
        if stdout.readline() != _READY:
            raise EngineDead("a client process ended before it was ready")
    for stdin in inputs:
        stdin.close()
    answers = [json.loads(stdout.read() or b"{}") for stdout in outputs]
    for process in running:
        process.wait()
    began_s = min(answer["began_s"] for answer in answers)
    return LoadResult(
        seconds=max(answer["ended_s"] for answer in answers) - began_s,
        tokens=sum(answer["tokens"] for answer in answers),
        first_s=[value for answer in answers for value in answer["first_s"]],
        events_s=[times for answer in answers for times in answer["events_s"]],
    )


async def _serve_clients(spec: LoadSpec) -> dict[str, Any]:
    random = np.random.default_rng(spec.seed)
    common = np.random.default_rng(7).integers(0, _VOCAB, spec.shared).tolist()
    left, answers = [spec.requests], list[Answer]()

    async def client() -> None:
        async with connected(spec.port) as connection:
            while left[0] > 0:
                left[0] -= 1
                own = random.integers(0, _VOCAB, spec.prompt - spec.shared).tolist()
                body = {
                    "model": "bench", "prompt": [*common, *own], "max_tokens": spec.output,
                    "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
                    "temperature": 0, **spec.params,
                }  # fmt: skip
                answers.append(await connection.ask(body))

    clock = SystemClock()
    began_s = clock.now()
    await asyncio.gather(*(client() for _ in range(spec.clients)))
    ended_s = clock.now()
    first_s, events_s, tokens = list[float](), list[list[float]](), 0
    for answer in answers:
        times = answer.event_times_s()
        first_s.append(times[0] - answer.began_s)
        events_s.append([round(at_s, 6) for at_s in times])
        tokens += int(answer.usage()["completion_tokens"])
    return {
        "began_s": began_s,
        "ended_s": ended_s,
        "tokens": tokens,
        "first_s": first_s,
        "events_s": events_s,
    }


def main() -> int:
    """Run one process of clients."""
    spec = LoadSpec(**json.loads(sys.stdin.readline()))
    sys.stdout.write(_READY.decode())
    sys.stdout.flush()
    sys.stdin.read()
    json.dump(asyncio.run(_serve_clients(spec)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
