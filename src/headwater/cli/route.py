"""`headwater route`: flags to settings, and the line that says where instances register."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any

from headwater.config import api_key_from_environment, peer_token_from_environment
from headwater.disagg.routing import POLICIES
from headwater.server.router.config import RouterConfig

_ABOUT = """\
A front door for many instances: the same endpoints, each request sent to the instance that
has the least to do before its first token. Instances register themselves:

  headwater route
  headwater serve --port 0 --router http://127.0.0.1:8100
"""

_ROUTER = RouterConfig()


def add_route(commands: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """The flags of the command."""
    parser: ArgumentParser = commands.add_parser(
        "route",
        usage="headwater route [flags]",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--host", default=_ROUTER.host, help=_help("address to bind"))
    parser.add_argument(
        "--port", type=int, default=_ROUTER.port, help=_help("port; 0 is any free one")
    )
    parser.add_argument(
        "--model", metavar="DIR", help="use this model's tokenizer (default: ask an instance)"
    )
    parser.add_argument(
        "--policy", choices=POLICIES, default=_ROUTER.policy, help=_help("who gets a request")
    )
    parser.add_argument(
        "--prefill-threshold",
        type=int,
        metavar="TOKENS",
        default=_ROUTER.prefill_threshold,
        help=_help("uncached tokens up to which a decode instance prefills a prompt itself"),
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key that clients must carry (or HEADWATER_API_KEY)"
    )
    parser.add_argument(
        "--peer-token",
        metavar="TOKEN",
        help="what instances must show to register (or HEADWATER_PEER_TOKEN)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="S",
        default=_ROUTER.drain_timeout_s,
        help=_help("seconds that running requests get to finish when the router is stopped"),
    )
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def run_route(options: Namespace) -> int:
    """Route until stopped; the exit code."""
    from headwater.launch.router import route
    from headwater.launch.server import StopSignals

    config = RouterConfig(
        host=options.host,
        port=options.port,
        model=options.model,
        policy=options.policy,
        prefill_threshold=options.prefill_threshold,
        api_key=options.api_key or api_key_from_environment(),
        peer_token=options.peer_token or peer_token_from_environment(),
        drain_timeout_s=options.drain_timeout,
    )
    return route(config, lambda url: _say(banner(url, config.policy)), StopSignals())


def banner(url: str, policy: str) -> str:
    """Where clients and instances come, and a line to try."""
    return f"""\
Headwater router is ready at {url}
  policy  {policy}
try:
  headwater serve --port 0 --router {url}
  curl {url}/instances
stop with Ctrl-C"""


def _help(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
