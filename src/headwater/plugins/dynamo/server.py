"""A `headwater serve` process of this worker. It listens on loopback only and ends with the
worker."""

import asyncio
import json
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from headwater.errors import ConfigError, EngineDead

_START_S = 600.0
_STOP_S = 20.0
_POLL_S = 0.2


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
        self._process = await asyncio.create_subprocess_exec(*command)
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{self._port}")
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

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """The JSON at `path`."""
        async with self._http.get(path) as response:
            return await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events of a request, decoded."""
        async with self._http.post(path, json=body) as response:
            if response.status != 200:
                raise EngineDead(f"the engine refused a request: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
