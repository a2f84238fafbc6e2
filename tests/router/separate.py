"""A router, a prefill and two decode instances, each a separate process that can die."""

import threading
from typing import Any

import httpx

from headwater.clock import SystemClock
from tests.e2e.live import LiveServer, Stream
from tests.router.live import LiveRouter

LEASE_S = 0.8
BLOCKS = 20
_BUSY = (
    "headwater:pd_handoffs_in_flight",
    'headwater:tier_blocks{state="held"',
    "headwater:num_requests_running",
    "headwater:num_requests_waiting",
)


class Separate:
    """The cluster; the router can be killed and started again at its address."""

    def __init__(self) -> None:
        self.router = LiveRouter()
        self.prefill = self.start("prefill")
        self.decodes = [self.start("decode"), self.start("decode")]
        for server in (self.prefill, *self.decodes):
            server.wait_ready()
        self.until_known()

    def start(self, role: str) -> LiveServer:
        place = ["--router", self.router.url, "--max-model-len", "1200"]
        peers = ["--splitwise-role", role, "--peer-lease", str(LEASE_S)]
        return LiveServer(*place, *peers, blocks=BLOCKS)

    @property
    def alive(self) -> list[LiveServer]:
        """Instances that run."""
        return [s for s in (self.prefill, *self.decodes) if s.process.poll() is None]

    @property
    def decoding(self) -> list[LiveServer]:
        """Decode instances that run."""
        return [server for server in self.decodes if server.process.poll() is None]

    def name(self, server: LiveServer) -> str:
        """The router's name for `server`."""
        return server.url.removeprefix("http://")

    def until_known(self) -> dict[str, Any]:
        return self.router.until_exact(*self.alive)

    def kill_router(self) -> None:
        self.router.process.kill()
        self.router.process.wait()

    def restart_router(self) -> None:
        """Start another router at the same port; all instances register again."""
        self.router = LiveRouter(port=self.router.port)
        self.until_known()

    def home(self, name: str) -> LiveServer:
        """The decode instance with the router's name `name`."""
        return next(server for server in self.decodes if self.name(server) == name)

    def ask(self, url: str = "", **fields: Any) -> httpx.Response:
        body = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}
        answer = httpx.post(
            f"{url or self.router.url}/v1/completions",
            json=body | {"return_token_ids": True} | fields,
            timeout=60,
        )
        return answer

    def ask_aside(self, **fields: Any) -> "Aside":
        return Aside(lambda: self.ask(**fields))

    def stream(self, **fields: Any) -> Stream:
        body = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "return_token_ids": True}
        return Stream(self.router.url, body | fields)

    def until_balanced(self, within_s: float = 8 * LEASE_S) -> None:
        """Wait until nothing runs, waits, is handed off or holds a block."""
        end_s = SystemClock().now() + within_s
        for server in self.alive:
            while busy := _busy(server):
                assert SystemClock().now() < end_s, busy

    def stop(self) -> None:
        for server in self.alive:
            assert server.stop() == 0, server.errors
        if self.router.process.poll() is None:
            assert self.router.stop() == 0


class Aside:
    """A request in another thread; its answer, or how its connection ended."""

    def __init__(self, ask: Any) -> None:
        self.answer: httpx.Response | None = None
        self.error: httpx.TransportError | None = None
        self._ask = ask
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except httpx.TransportError as error:
            self.error = error

    def end(self, within_s: float = 20.0) -> "Aside":
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "a request hangs"
        return self


def ids(pieces: list[Any]) -> list[int]:
    """The tokens of a streamed answer."""
    return [token for piece in pieces for token in piece["choices"][0]["token_ids"]]


def _busy(server: LiveServer) -> list[str]:
    lines = server.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith(_BUSY) and not line.endswith(" 0.0")]
