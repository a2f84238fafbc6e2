"""The `headwater` command: parses, imports what the command needs, calls it.

Nothing heavier than the parser is imported before a command is known.
"""

import importlib
import logging
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from headwater import __version__
from headwater.cli.parser import build_parser
from headwater.errors import HeadwaterError
from headwater.words import suggest

__all__ = ["main"]

_COMMANDS = (
    "serve",
    "route",
    "up",
    "demo",
    "bench",
    "replay",
    "plan",
    "storage",
    "top",
    "version",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 1 is a failure with a sentence, 2 a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _COMMANDS:
        return _fail(
            f"unknown command {arguments[0]!r}{suggest(arguments[0], _COMMANDS)}", code=2
        )
    if arguments[:1] == ["bench"]:
        return _guard(lambda: _bench(arguments[1:]))
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        return _fail(_unknown(unknown, options.flags), code=2)
    if options.command is None:
        parser.print_help()
        return 0
    given = frozenset(name.partition("=")[0] for name in arguments if name.startswith("--"))
    return _guard(lambda: _run(options, given))


def _run(options: Namespace, given: frozenset[str]) -> int:
    if options.command == "version":
        sys.stdout.write(f"headwater {__version__}\n")
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.command == "demo":
        from headwater.cli.demo import run_demo

        return run_demo()
    if options.command == "replay":
        from headwater.cli.replay import run_replay

        return run_replay(options)
    if options.command == "plan":
        from headwater.cli.plan import run_plan

        return run_plan(options)
    if options.command == "route":
        from headwater.cli.route import run_route

        return run_route(options)
    if options.command == "up":
        from headwater.cli.up import run_up

        return run_up(options)
    if options.command == "top":
        from headwater.cli.top import run_top

        return run_top(options)
    if options.command == "storage":
        from headwater.cli.storage import run_storage

        return run_storage(options)
    from headwater.cli.serve import run_serve

    return run_serve(options, given)


def _bench(arguments: list[str]) -> int:
    """`headwater bench NAME …` is the `main` of `headwater.bench.NAME`."""
    package = importlib.import_module("headwater.bench")
    known = sorted(
        entry.name
        for entry in pkgutil.iter_modules(package.__path__)
        if not entry.name.startswith("_")
    )
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: headwater bench {{{','.join(known)}}} ...\n")
        return 0
    name = arguments[0]
    if name not in known:
        return _fail(f"unknown benchmark {name!r}{suggest(name, known)}", code=2)
    run: Callable[[Sequence[str]], int | None] = importlib.import_module(
        f"headwater.bench.{name}"
    ).main
    return run(arguments[1:]) or 0


def _guard(run: Callable[[], int]) -> int:
    """Errors we raise on purpose are a sentence, not a traceback."""
    try:
        return run()
    except HeadwaterError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headwater"):
            raise
        return _fail(
            f"the package {error.name!r} is not installed; "
            "try: pip install 'headwater[engine,server]'"
        )
    except KeyboardInterrupt:
        return 130


def _unknown(unknown: Sequence[str], flags: Sequence[str]) -> str:
    first = unknown[0].partition("=")[0]
    kind = "flag" if first.startswith("-") else "argument"
    return f"unknown {kind} {first!r}{suggest(first, flags)}"


def _fail(sentence: str, *, code: int = 1) -> int:
    sys.stderr.write(f"headwater: error: {sentence}\n")
    return code
