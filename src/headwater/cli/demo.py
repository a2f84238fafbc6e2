"""`headwater demo`: a conversation over HTTP; each turn is sent twice, with and without cached
history.

The warm requests of a conversation share a `cache_salt`, so each turn finds the blocks of the
turn before. The cold twin of each turn has its own salt and finds nothing: the same work,
uncached.
"""

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from headwater.clock import Clock, SystemClock
from headwater.errors import EngineDead

_SYSTEM = (
    "You are the keeper of a mountain spring. Answer in the manner of a field guide: "
    "name the rock, the plants and the season; say what the water carries and where it goes. "
) * 12
_QUESTIONS = (
    "Where does the water come from?",
    "How long has it been under the mountain?",
    "What grows beside it in early summer?",
    "Which animals come to drink, and when?",
    "Where does the stream meet the river?",
)
_ANSWER_TOKENS = 48
_READY = re.compile(r"is ready at (http://\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTurn:
    """The cost of one request."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str


def run_demo(clock: Clock | None = None) -> int:
    """Start a server, hold the conversation, print the table, stop the server, and return the
    exit code."""
    clock = clock or SystemClock()
    console = Console()
    with _server(console) as url:
        console.print(
            f"a server runs at {url}; a conversation of {len(_QUESTIONS)} turns follows"
        )
        pairs = _converse(url, clock)
    console.print(_table(pairs))
    console.print(_summary(pairs))
    console.print("now try: [bold]headwater serve[/bold]")
    return 0


def _converse(url: str, clock: Clock) -> list[tuple[DemoTurn, DemoTurn]]:
    """Each turn twice: with the salt of the conversation, then with a salt of its own."""
    messages = [{"role": "system", "content": _SYSTEM}]
    _ask(url, [{"role": "user", "content": "warm up"}], "demo-warm-up", clock)
    pairs = []
    for number, question in enumerate(_QUESTIONS):
        messages.append({"role": "user", "content": question})
        warm = _ask(url, messages, "demo-conversation", clock)
        cold = _ask(url, messages, f"demo-cold-{number}", clock)
        messages.append({"role": "assistant", "content": warm.text})
        pairs.append((warm, cold))
    return pairs


def _ask(url: str, messages: list[dict[str, str]], salt: str, clock: Clock) -> DemoTurn:
    body = {
        "messages": messages,
        "cache_salt": salt,
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    began_s = clock.now()
    first_s: float | None = None
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    for event in _events(connection.getresponse()):
        first_s = clock.now() if first_s is None else first_s
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        usage = event.get("usage") or usage
    connection.close()
    return _turn(usage, (first_s or clock.now()) - began_s, "".join(pieces))


def _turn(usage: dict[str, Any], first_token_s: float, text: str) -> DemoTurn:
    return DemoTurn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        first_token_s=first_token_s,
        # The built-in model generates noise, and characters that are not valid text would be
        # lost in JSON.
        text=text.encode("ascii", "ignore").decode() or "...",
    )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise EngineDead(f"the demo's server answered {response.status}: {response.read()!r}")
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)


def _table(pairs: list[tuple[DemoTurn, DemoTurn]]) -> Table:
    table = Table(title="what the prefix cache saved")
    for name in ("turn", "prompt tokens", "reused", "first token", "without cache", "saved"):
        table.add_column(name, justify="right")
    for number, (warm, cold) in enumerate(pairs, start=1):
        share = warm.cached_tokens / warm.prompt_tokens
        table.add_row(
            str(number),
            f"{warm.prompt_tokens:,}",
            f"{warm.cached_tokens:,} ({share:.0%})",
            f"{warm.first_token_s * 1e3:.1f} ms",
            f"{cold.first_token_s * 1e3:.1f} ms",
            f"{1 - warm.first_token_s / cold.first_token_s:.0%}" if warm.cached_tokens else "-",
        )
    return table


def _summary(pairs: list[tuple[DemoTurn, DemoTurn]]) -> str:
    prompt = sum(warm.prompt_tokens for warm, _ in pairs)
    reused = sum(warm.cached_tokens for warm, _ in pairs)
    warm_s = sum(warm.first_token_s for warm, _ in pairs)
    cold_s = sum(cold.first_token_s for _, cold in pairs)
    return (
        f"{reused:,} of {prompt:,} prompt tokens were found in the cache and not computed again; "
        f"waiting for first tokens took {warm_s * 1e3:.0f} ms instead of {cold_s * 1e3:.0f} ms"
    )


@contextmanager
def _server(console: Console) -> Iterator[str]:
    """The address of a server with the built-in model. The server is stopped at the end of the
    `with` statement."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0"]
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--num-gpu-blocks-override", "512"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            with console.status("starting a server on the built-in model"):
                url = _wait_ready(process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def _wait_ready(process: "subprocess.Popen[str]", log: IO[str]) -> str:
    """Wait until the server is ready and return its address. Its log is shown only if it does
    not start."""
    assert process.stdout is not None, "the process has a pipe"
    for line in process.stdout:
        if found := _READY.search(line):
            return found.group(1)
    code = process.wait()
    log.seek(0)
    raise EngineDead(
        f"the demo's server ended with exit code {code}: {log.read()[-2000:].strip()}"
    )
