"""A real server process on the built-in model, as an operator would start it."""

import atexit
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.waiting import until

_READY = re.compile(r"is ready at (http://\S+)")
_ENGINE = re.compile(r"engine +process (\d+)")


class LiveServer:
    """`headwater serve` with these flags, on a free port, until `stop`."""

    def __init__(self, *flags: str, blocks: int = 128) -> None:
        command = [sys.executable, "-m", "headwater", "serve", "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, "--num-gpu-blocks-override", str(blocks), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.url = ""
        self.engine_pid = 0
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        # A test that fails half-way leaves its server; the end of the tests does not.
        atexit.register(self.process.kill)

    @property
    def worker_pids(self) -> list[int]:
        """The running HTTP workers."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline") for child in children}
        return [pid for pid, path in commands.items() if b"launch.worker" in path.read_bytes()]

    def wait_ready(self) -> "LiveServer":
        """Read the banner; raises with the server's output if there is none."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := _READY.search(line):
                self.url = found.group(1)
            if found := _ENGINE.search(line):
                self.engine_pid = int(found.group(1))
            if line.startswith("stop with"):
                return self
        raise AssertionError(f"no server: {self.lines} {self.errors}")

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.errors.extend(lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it and return its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the exit code."""
        code = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)
        self.process.stdout.close()
        self._reader.join()
        return code

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def complete(self, *, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"prompt": "hello", "temperature": 0} | fields
        return self.post("/v1/completions", body, headers=headers)

    def open_stream(self, *, headers: Any = None, **fields: Any) -> "Stream":
        return Stream(self.url, fields, headers)

    def until(
        self, reached: Callable[[dict[str, Any]], bool], **options: Any
    ) -> dict[str, Any]:
        """Request /cache until `reached(state)`; return that state."""
        deadline = time.monotonic() + 60
        while True:
            state: dict[str, Any] = self.get("/cache", **options).json()
            if reached(state):
                return state
            assert time.monotonic() < deadline, state

    def until_draining(self) -> None:
        """Request /health until the server drains."""
        until(lambda: "draining" in self.get("/health").text, within_s=60, pause_s=0)

    def until_healthy(self, within_s: float = 60.0) -> None:
        """Request /health until it is 200."""
        until(lambda: self.get("/health").status_code == 200, within_s=within_s)

    def until_idle(self) -> dict[str, Any]:
        """Request /cache until nothing runs and nothing waits; return that state."""
        return self.until(lambda state: not state["num_running"] and not state["num_waiting"])


class Stream:
    """A streamed completion that is read event by event, over its own connection."""

    def __init__(
        self,
        url: str,
        fields: dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            place.hostname or "", place.port, timeout=timeout_s
        )
        body = {
            "prompt": "hello",
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        } | fields
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers or {})
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def header(self, name: str) -> str | None:
        """A header of the response."""
        return self._response.getheader(name)

    def next(self) -> Any:
        """The next event; None at the end."""
        for line in self._response:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return None
            if data:
                return json.loads(data)
        raise ConnectionError("the stream ended without [DONE]")

    def rest(self) -> list[Any]:
        """Every event up to the end."""
        found = []
        while (event := self.next()) is not None:
            found.append(event)
        return found

    def close(self) -> None:
        """Close the connection, in the middle or not."""
        self._response.close()
        self._connection.close()
