"""`headwater top`: what a server is doing, live in a terminal."""

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections import deque
from threading import Event
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from headwater.config import api_key_from_environment
from headwater.errors import ConfigError, HeadwaterError
from headwater.metrics.rates import ServerRates, is_restart, rates_between

_ABOUT = """\
Show what a server is doing: throughput, latency, where prompts came from, tiers, transfers,
misses and requests, once a second. The same as its page at /dashboard. Ctrl-C leaves.

  headwater top
  headwater top http://127.0.0.1:8000 --once
"""

_pause = Event().wait

_TIMEOUT_S = 6.0
_HISTORY = 240


class Unreachable(HeadwaterError):
    """The server does not answer, or not with what a server says."""


def add_top(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = commands.add_parser(
        "top",
        usage="headwater top [URL] [flags]",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the server"
    )
    parser.add_argument("--api-key", metavar="KEY", help="its key (or HEADWATER_API_KEY)")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one look and leave")
    parser.add_argument(
        "--json", action="store_true", help="print the answers of GET /stats, one a line"
    )
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.set_defaults(flags=flags)


def run_top(options: Namespace) -> int:
    """Watch until Ctrl-C; the exit code."""
    if not 0.1 <= options.interval <= 3600:
        raise ConfigError(f"--interval is from 0.1 to 3600 seconds, got {options.interval:g}")
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL begins with http:// or https://, got {options.url!r}")
    server = StatusClient(options.url, options.api_key or api_key_from_environment())
    if options.json:
        return _print_answers(server, options)
    return _print_once(server, options) if options.once else _live(server, options)


class StatusClient:
    """Asks a server what it is doing."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def stats(self) -> dict[str, Any]:
        """The answer of GET /stats, or Unreachable with a sentence."""
        try:
            request = Request(self.url + "/stats", headers=self._headers)
            with urlopen(request, timeout=_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as exc:
            with exc:
                hint = "; see --api-key" if exc.code == 401 else ""
                raise Unreachable(f"{self.url} answers {exc.code} {exc.reason}{hint}") from exc
        except (URLError, OSError, ValueError) as exc:
            raise Unreachable(f"{self.url} does not answer: {exc}") from exc


class Watcher:
    """Answers one after the other, and what happened between them."""

    def __init__(self) -> None:
        self.now: dict[str, Any] | None = None
        self.rates: ServerRates | None = None
        self.history: deque[ServerRates] = deque(maxlen=_HISTORY)

    def take(self, answer: dict[str, Any]) -> None:
        """The next answer. A server that was restarted begins anew."""
        before, self.now = self.now, answer
        if before is None or is_restart(before, answer):
            self.rates = None
        elif (found := rates_between(before, answer)) is not None:
            self.rates = found
            self.history.append(found)


def _print_answers(server: StatusClient, options: Namespace) -> int:
    while True:
        sys.stdout.write(json.dumps(server.stats()) + "\n")
        sys.stdout.flush()
        if options.once:
            return 0
        _pause(options.interval)


def _print_once(server: StatusClient, options: Namespace) -> int:
    from rich.console import Console

    from headwater.cli.panes import screen

    watcher = Watcher()
    watcher.take(server.stats())
    _pause(options.interval)
    watcher.take(server.stats())
    Console(file=sys.stdout, highlight=False).print(screen(watcher, server.url, "live"))
    return 0


def _live(server: StatusClient, options: Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from headwater.cli.panes import screen

    watcher, state = Watcher(), "live"
    watcher.take(server.stats())
    console = Console(highlight=False)
    with Live(
        screen(watcher, server.url, state),
        console=console,
        screen=console.is_terminal,
        auto_refresh=False,
        vertical_overflow="crop",
    ) as live:
        while True:
            _pause(options.interval)
            try:
                watcher.take(server.stats())
                state = "live"
            except Unreachable:
                state = "waiting for the server"
            live.update(screen(watcher, server.url, state), refresh=True)
