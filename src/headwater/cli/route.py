"""`headwater route`: converts flags to settings and prints the banner."""

import os
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction

from headwater.cli.security import (
    add_access_flags,
    allowed_hosts_of,
    api_key_of,
    peer_token_of,
    tls_of,
)
from headwater.cli.values import add_command
from headwater.config import LOG_FORMATS
from headwater.disagg.routing import POLICIES
from headwater.server.router.config import RouterConfig

_ABOUT = """\
A router in front of many instances, with the same endpoints. Each request goes to the instance
with the least work before its first token. Instances register themselves; router and instances
share a secret:

  export HEADWATER_PEER_TOKEN=$(openssl rand -hex 16)
  headwater route
  headwater serve --port 0 --router http://127.0.0.1:8100
"""

_ROUTER = RouterConfig(is_insecure=True)


def add_route(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "route [flags]", _ABOUT)
    parser.add_argument("--host", default=_ROUTER.host, help=_help("address to bind"))
    parser.add_argument(
        "--port", type=int, default=_ROUTER.port, help=_help("port; 0 is any free one")
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="tokenize with this model's tokenizer (default: ask an instance)",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=_ROUTER.policy,
        help=_help("how an instance is selected"),
    )
    parser.add_argument(
        "--prefill-threshold",
        type=int,
        metavar="TOKENS",
        default=_ROUTER.prefill_threshold,
        help=_help("uncached tokens up to which a decode instance prefills a prompt itself"),
    )
    add_access_flags(parser)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="run without a peer token: any process that can connect can register instances",
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="S",
        default=_ROUTER.drain_timeout_s,
        help=_help("seconds for running requests to finish when the router is stopped"),
    )
    parser.add_argument(
        "--log-format", choices=LOG_FORMATS, default="text", help=_help("format of log lines")
    )
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def run_route(options: Namespace) -> int:
    """Route until stopped; return the exit code."""
    from headwater.launch.parent_watch import watch_parent
    from headwater.launch.router import route
    from headwater.launch.signals import StopSignals
    from headwater.metrics.logs import set_up_logs

    set_up_logs(options.log_format)

    watch_parent(os.environ)

    config = RouterConfig(
        host=options.host,
        port=options.port,
        model=options.model,
        policy=options.policy,
        prefill_threshold=options.prefill_threshold,
        api_key=api_key_of(options),
        api_keys_file=options.api_keys_file,
        allowed_hosts=allowed_hosts_of(options),
        tls=tls_of(options),
        peer_token=peer_token_of(options),
        is_insecure=options.insecure,
        drain_timeout_s=options.drain_timeout,
    )
    return route(config, lambda url: _say(banner(url, config.policy)), StopSignals())


def banner(url: str, policy: str) -> str:
    """The addresses for clients and instances, and a command to try."""
    return f"""\
Headwater router is ready at {url}
  policy  {policy}
try:
  headwater serve --port 0 --router {url}
  curl {url}/instances
  {url}/dashboard in a browser
stop with Ctrl-C"""


def _help(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
