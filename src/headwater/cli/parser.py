"""The whole command line: every command and its flags."""

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter

from headwater.cli.certs import add_certs
from headwater.cli.check import add_check
from headwater.cli.cluster import add_cluster_commands
from headwater.cli.flags import add_serve
from headwater.cli.plan import add_plan
from headwater.cli.replay import add_replay
from headwater.cli.route import add_route
from headwater.cli.storage import add_storage
from headwater.cli.top import add_top
from headwater.cli.up import add_up
from headwater.cli.warm import add_warm
from headwater.config import VERSION

_ABOUT = """\
Headwater serves large language models whose prompts repeat: a prefix is computed once,
and its KV cache is found again.

commands:
  serve [MODEL]   an OpenAI-compatible server; without MODEL the built-in tiny model
  route           a router before many instances
  up              a whole cluster: a router and instances of each role, from flags or a file
  status, scale, drain, restart, logs, down
                  for a running cluster
  demo            a short conversation on the built-in model, with what the cache saved
  bench NAME      the benchmarks of the documentation
  replay TRACE    a recorded trace, served by the real engine on a virtual clock
  plan TRACE      how much memory of which kind a recorded trace is worth
  storage ACTION  look into a storage directory: ls, stats, verify, prune
  certs FOLDER    a development CA and certificates for TLS
  top [URL]       what a server is doing, updated each second in this terminal
  check MODEL     whether and how a model would be served, and what fits in memory
  warm [MODEL]    compile the GPU kernels of a model, for image builds
  doctor          what this machine has, what is missing or slow, and how to fix it
  version         the version of this program

`headwater COMMAND --help` has the flags of a command.
"""

_WITHOUT_FLAGS = {
    "bench": "Run a benchmark.",
    "demo": "Start a server with the built-in model, hold a conversation of five turns, and print what the cache saved.",
    "doctor": "Print what this machine has, what is missing or slow, and the command that fixes it.",
    "version": "Print the version of this program.",
}


def build_parser() -> ArgumentParser:
    """The whole command line. The result of parsing has `flags`, for suggestions."""
    parser = ArgumentParser(
        prog="headwater",
        usage="headwater COMMAND [flags]",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.set_defaults(command=None, flags=["--help", "--version"])
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="headwater", help=SUPPRESS
    )
    add_serve(commands)
    for name, text in _WITHOUT_FLAGS.items():
        commands.add_parser(name, description=text, allow_abbrev=False)
    add_certs(commands)
    add_check(commands)
    add_cluster_commands(commands)
    add_plan(commands)
    add_replay(commands)
    add_route(commands)
    add_storage(commands)
    add_top(commands)
    add_up(commands)
    add_warm(commands)
    return parser
