"""A router process, as an operator would start it."""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

TOKEN = "secret-of-live-tests"
_READY = re.compile(r"is ready at (http://\S+)")


class LiveCommand:
    """`headwater` with these arguments, until it is stopped; its output lines are kept."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # A test that fails half-way leaves its process; the end of the tests does not.
        atexit.register(self.process.kill)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)
                if found := _READY.search(line):
                    self.url = found.group(1)

    def until_printed(self, text: str, within_s: float = 60.0) -> str:
        """Wait for a line that contains `text`, and return it."""
        deadline = time.monotonic() + within_s
        while True:
            found = next((line for line in list(self.lines) if text in line), None)
            if found is not None:
                return found
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < deadline, self.lines
            self._reader.join(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it and return its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self._reader.join()
        return code


class RouterClient:
    """Queries the state of the router at `url`."""

    url: str

    def instances(self) -> dict[str, Any]:
        found = httpx.get(f"{self.url}/instances", timeout=10).json()["instances"]
        return {entry["instance_id"]: entry for entry in found}

    def until(self, reached: Any, within_s: float = 30.0) -> dict[str, Any]:
        """Query the registered instances until `reached(known)`."""
        deadline = time.monotonic() + within_s
        while True:
            known = self.instances()
            if reached(known):
                return known
            assert time.monotonic() < deadline, known


class LiveRouter(RouterClient, LiveCommand):
    """`headwater route`, ready."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        secret = () if "HEADWATER_PEER_TOKEN" in os.environ else ("--peer-token", TOKEN)
        super().__init__("route", "--port", str(port), *secret, *flags)
        self.until_printed("stop with")
        self.port = int(self.url.rpartition(":")[2])

    def until_exact(self, *servers: Any) -> dict[str, Any]:
        """Wait until the caches of these servers are exactly known."""
        names = [server.url.removeprefix("http://") for server in servers]
        return self.until(
            lambda known: all(known.get(n, {}).get("trust") == "exact" for n in names)
        )

    def post(self, **fields: Any) -> httpx.Response:
        body = {"prompt": "hello " * 50, "temperature": 0, "max_tokens": 4} | fields
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
