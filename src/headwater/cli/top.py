"""`headwater top`: what a server is doing, live in a terminal."""

import json
import ssl
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections import deque
from http import HTTPStatus
from http.client import RemoteDisconnected
from threading import Event
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from headwater.cli.keys_pressed import PressedKeys
from headwater.cli.values import add_command
from headwater.config import api_key_from_environment
from headwater.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    from rich.console import RenderableType

_ABOUT = """\
Show what a server is doing: throughput, latency, where prompts came from, tiers, transfers,
misses and requests, once per second. The same as its page at /dashboard: median and 99th
percentile are of the last minute, hits of the last half minute. Of a router: each instance with
its state, load, rate and hits. `q` or Ctrl-C leaves.

  headwater top
  headwater top http://127.0.0.1:8000 --once
  headwater top http://127.0.0.1:8100       # a router
"""

_pause = Event().wait

_TIMEOUT_S = 6.0
_MAX_POINTS = 1000
"""More than a server keeps."""


class Unreachable(HeadwaterError):
    """The server does not answer, or its answer is not that of a Headwater server."""

    def __init__(self, sentence: str, *, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


def add_top(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "top [URL] [flags]", _ABOUT)
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="URL of the server or router",
    )
    parser.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="PEM file with the CA of a server with TLS (default: the CAs of the system)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key of the server (or HEADWATER_API_KEY)"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between two updates (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print the view once and exit")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the answers of GET /stats (of a router: GET /instances), one per line",
    )
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def run_top(options: Namespace) -> int:
    """Watch until `q` or Ctrl-C; return the exit code."""
    if not 0.1 <= options.interval <= 3600:
        raise ConfigError(
            f"--interval must be from 0.1 to 3600 seconds, got {options.interval:g}"
        )
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL must begin with http:// or https://, got {options.url!r}")
    server = StatusClient(
        options.url,
        options.api_key or api_key_from_environment(),
        ca_certs=options.ssl_ca_certs,
    )
    if options.json:
        return _print_answers(server, options)
    return _print_once(server) if options.once else _live(server, options)


class StatusClient:
    """Asks a server for its status."""

    def __init__(self, url: str, api_key: str | None, *, ca_certs: str | None = None) -> None:
        """Raises ConfigError for a file `ca_certs` that holds no certificates."""
        self.url = url.rstrip("/")
        try:
            self._tls = ssl.create_default_context(cafile=ca_certs) if ca_certs else None
        except OSError as exc:
            raise ConfigError(f"--ssl-ca-certs {ca_certs} cannot be read: {exc}") from exc
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def stats(self) -> dict[str, Any]:
        """The answer of GET /stats. Raises Unreachable."""
        return self._get("/stats", _TIMEOUT_S)

    def history(self, after_unix_s: float) -> dict[str, Any]:
        """The answer of GET /stats/history: points newer than `after_unix_s`."""
        return self._get(f"/stats/history?after={after_unix_s:.6f}", _TIMEOUT_S)

    def instances(self) -> dict[str, Any]:
        """The answer of a router's GET /instances. Raises Unreachable."""
        return self._get("/instances", _TIMEOUT_S)

    def is_router(self) -> bool:
        """Whether a router answers. Raises Unreachable if nothing answers."""
        try:
            self.stats()
        except Unreachable as exc:
            if exc.status != HTTPStatus.NOT_FOUND:
                raise
            self.instances()
            return True
        return False

    def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        try:
            request = Request(self.url + path, headers=self._headers)
            with urlopen(request, timeout=timeout_s, context=self._tls) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as exc:
            with exc:
                hint = "; see --api-key" if exc.code == 401 else ""
                raise Unreachable(
                    f"{self.url} answers {exc.code} {exc.reason}{hint}", status=exc.code
                ) from exc
        except (URLError, OSError, ValueError) as exc:
            raise Unreachable(f"{self.url} does not answer: {_reason(exc)}") from exc


def _reason(exc: Exception) -> str:
    """Why a request failed, and what may help."""
    reason = exc.reason if isinstance(exc, URLError) else exc
    text = getattr(reason, "strerror", None) or str(reason)
    if "CERTIFICATE_VERIFY_FAILED" in str(reason):
        return f"{text}; see --ssl-ca-certs"
    if isinstance(reason, RemoteDisconnected):
        return f"{text}; write https:// if the server uses TLS"
    return text


class RouterWatcher:
    """The instances of a router, as they report themselves to it."""

    def __init__(self, client: StatusClient) -> None:
        self._client = client
        self._answer: dict[str, Any] = {}

    def look(self) -> None:
        """Ask the router once."""
        self._answer = self._client.instances()

    def screen(self, state: str) -> "RenderableType":
        from headwater.cli.router_panes import router_screen

        return router_screen(self._answer, self._client.url, state)


class ServerWatcher:
    """One server: its state now, and the points of its history."""

    def __init__(self, client: StatusClient) -> None:
        self._client = client
        self._now: dict[str, Any] = {}
        self._points: deque[dict[str, Any]] = deque(maxlen=_MAX_POINTS)

    def look(self) -> None:
        """Ask the server once, for its state and for the points that are not here yet."""
        self._now = self._client.stats()
        last_s = self._points[-1]["unix_s"] if self._points else 0.0
        history = self._client.history(last_s)
        if history["now_unix_s"] < last_s:  # its clock was set back
            self._points.clear()
        self._points.extend(history["points"])
        oldest_s = history["now_unix_s"] - history["span_s"]
        while self._points and self._points[0]["unix_s"] < oldest_s:
            self._points.popleft()

    def screen(self, state: str) -> "RenderableType":
        from headwater.cli.panes import screen

        return screen(self._now, list(self._points), self._client.url, state)


def _print_answers(server: StatusClient, options: Namespace) -> int:
    ask = server.instances if server.is_router() else server.stats
    while True:
        sys.stdout.write(json.dumps(ask()) + "\n")
        sys.stdout.flush()
        if options.once:
            return 0
        _pause(options.interval)


def _watch(server: StatusClient) -> RouterWatcher | ServerWatcher:
    watcher = RouterWatcher(server) if server.is_router() else ServerWatcher(server)
    watcher.look()
    return watcher


def _print_once(server: StatusClient) -> int:
    from rich.console import Console

    watcher = _watch(server)
    Console(file=sys.stdout, highlight=False).print(watcher.screen("live"))
    return 0


def _live(server: StatusClient, options: Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    watcher, state = _watch(server), "live"
    console = Console(highlight=False)
    with (
        PressedKeys() as keys,
        Live(
            watcher.screen(state),
            console=console,
            screen=console.is_terminal,
            auto_refresh=False,
            vertical_overflow="crop",
        ) as live,
    ):
        while "q" not in keys.wait(options.interval).lower():
            try:
                watcher.look()
                state = "live"
            except Unreachable:
                state = "waiting for the server"
            live.update(watcher.screen(state), refresh=True)
    return 0
