"""A `headwater serve` process of this worker. It listens on loopback only and ends with the
worker."""

import asyncio
import json
import os
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from headwater.errors import ConfigError, EngineDead, HeadwaterError, QueueFull, RequestError
from headwater.launch.parent_watch import VARIABLE

_START_S = 600.0
_STOP_S = 20.0
_POLL_S = 0.2

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
"""A stream may last as long as its answer does."""


class OwnServer:
    """Starts a server for `model`, sends it HTTP requests, and stops it."""

    def __init__(self, model: str | None, flags: Sequence[str]) -> None:
        self._model = model
        self._flags = list(flags)
        # KV events contain prompts. Only this user can reach a socket in a folder of mode 0700.
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-dynamo-")
        self.events_endpoint = f"ipc://{self._folder.name}/kv-events"
        self._port = _free_port()
        self._process: Process | None = None
        self._lifeline: int | None = None
        """Write end of a pipe. When this process dies, the system closes it and the server ends."""
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> dict[str, Any]:
        """Start the server and return its `/server_info` when it answers."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events_endpoint,
            "replay_endpoint": f"ipc://{self._folder.name}/kv-replay",
            "token_ids": True,
            "insecure": True,
        }
        command = [sys.executable, "-m", "headwater", "serve"]
        command += [self._model] if self._model else []
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--kv-events-config", json.dumps(events), *self._flags]
        watched, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=os.environ | {VARIABLE: str(watched)}, pass_fds=(watched,)
            )
        finally:
            os.close(watched)
        self.connect(f"http://127.0.0.1:{self._port}")
        for _ in range(int(_START_S / _POLL_S)):
            if self._process.returncode is not None:
                raise ConfigError(
                    f"headwater serve ended with {self._process.returncode} before it was ready; "
                    "its message is above"
                )
            if await self._is_healthy():
                info: dict[str, Any] = await self.get("/server_info")
                return info
            await asyncio.sleep(_POLL_S)
        raise ConfigError(
            f"headwater serve was not ready after {_START_S:g} s; its log lines are above"
        )

    def connect(self, url: str) -> None:
        """Send requests to `url`. Their number is limited by the server, not here."""
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=_TIMEOUT)

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """The JSON at `path`. Raises EngineDead when the server gives none."""
        try:
            async with self._http.get(path) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                return await response.json()
        except aiohttp.ClientError as error:
            raise EngineDead(f"the connection to headwater serve broke: {error}") from error

    async def wait_end(self) -> int:
        """Wait until the server process has ended, and return its exit code."""
        assert self._process is not None, "called after start"
        return await self._process.wait()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events of a request, decoded.

        Raises RequestError for a request that no engine would accept, QueueFull, and EngineDead
        when the server fails.
        """
        try:
            async with self._http.post(path, json=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text())
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise EngineDead(event["error"]["message"])
                        yield event
        except aiohttp.ClientError as error:
            raise EngineDead(f"the connection to headwater serve broke: {error}") from error

    async def stop(self) -> None:
        """End the server. Calling it twice is safe."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self._folder.cleanup()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineDead("the server of this worker is not running")
        return self._session

    async def _is_healthy(self) -> bool:
        try:
            async with self._http.get("/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


def _refusal(status: int, text: str) -> HeadwaterError:
    """The error for an answer with this status."""
    message = f"headwater serve answered {status}: {text}"
    if status == 429:
        return QueueFull(message)
    return RequestError(message) if status < 499 else EngineDead(message)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
