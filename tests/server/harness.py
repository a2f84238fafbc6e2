"""A server over an echo engine, in the test's own event loop."""

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from headwater.clock import SystemClock
from headwater.engine.client import GetStats
from headwater.engine.tokenizer import Tokenizer
from headwater.server.access import make_access_policy
from headwater.server.app import create_app
from headwater.server.config import LimitsConfig, ServerConfig
from headwater.server.middleware import ReadinessMiddleware
from headwater.server.service import Service
from headwater.testing.engines import EchoEngine, make_tokenizer_folder


@functools.cache
def byte_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer(make_tokenizer_folder(Path(folder)))


def completion_scope() -> dict[str, Any]:
    """The ASGI scope of a completion request, for tests that play the HTTP server."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }


class Harness:
    """A client, its application, and the engine behind it."""

    def __init__(
        self,
        limits: LimitsConfig | None = None,
        engine: EchoEngine | None = None,
        **settings: Any,
    ) -> None:
        config = ServerConfig(limits=limits or LimitsConfig(), **settings)
        self.engine = engine or EchoEngine()
        self.service = Service(
            self.engine, byte_tokenizer(), config, SystemClock(), created_s=1_700_000_000.0
        )
        self.readiness = ReadinessMiddleware(
            make_access_policy(config, SystemClock(), lambda: 1.7e9)
        )
        self.readiness.open(create_app(self.service))
        transport = httpx.ASGITransport(self.readiness)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post(
            "/v1/completions", {"prompt": "hello", "temperature": 0} | fields
        )

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 8} | fields
        )

    async def until(self, reached: Callable[[], bool]) -> None:
        """Run the event loop until a condition is true; pytest's own timeout limits the
        wait."""
        while not reached():  # noqa: ASYNC110 -- what is waited for has no event of its own
            await asyncio.sleep(0)

    async def until_live(self, count: int) -> None:
        """Wait until the server has this many sequences."""
        await self.until(lambda: self.service.live.num_sequences >= count)

    async def until_waiting(self, count: int) -> None:
        """Wait until the engine has this many waiting sequences."""
        await self.until(lambda: self.engine.core.stats().num_waiting >= count)

    async def until_idle(self) -> None:
        """Wait until the engine has nothing to do."""
        await self.until(lambda: not self.engine.core.has_work)

    async def all_free(self) -> bool:
        device = (await self.engine.control(GetStats())).tiers["device"]
        return device.held == 0 and device.free + device.evictable == device.num_blocks


def run(scenario: Any, limits: LimitsConfig | None = None, **settings: Any) -> None:
    """Run `scenario(harness)`; afterwards nothing is alive and all invariants hold."""

    async def whole() -> None:
        harness = Harness(limits, **settings)
        async with harness.client:
            await scenario(harness)
        harness.service.close()
        assert harness.service.live.num_sequences == 0
        harness.engine.core.check()

    asyncio.run(whole())


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, without the final [DONE], which is checked."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found
