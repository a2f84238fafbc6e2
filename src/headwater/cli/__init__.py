"""The `headwater` command: parses the command line, imports what the command needs, and calls
it.

Only the parser is imported before a command is known.
"""

import ast
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from headwater import __version__
from headwater.cli.cluster import VERBS
from headwater.cli.foreign_flags import explain
from headwater.cli.parser import build_parser
from headwater.errors import HeadwaterError
from headwater.words import suggest

__all__ = ["main"]

_COMMANDS = (
    "serve",
    "route",
    "up",
    *VERBS,
    "certs",
    "check",
    "warm",
    "demo",
    "bench",
    "replay",
    "plan",
    "storage",
    "top",
    "doctor",
    "version",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 1 for a failure with a message, 2 for a usage
    error."""
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
        return _fail(_unknown(unknown, options), code=2)
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
    if options.command == "serve":
        from headwater.cli.serve import run_serve

        return run_serve(options, given)
    if options.command in VERBS:
        from headwater.cli.cluster import run_cluster

        return run_cluster(options)
    # Every other command is `run_NAME` in the module of its name.
    module = importlib.import_module(f"headwater.cli.{options.command}")
    run: Callable[..., int] = getattr(module, f"run_{options.command}")
    return run() if options.command in ("demo", "doctor") else run(options)


def _bench(arguments: list[str]) -> int:
    """`headwater bench NAME …` calls the `main` of `headwater.bench.NAME`."""
    package = importlib.import_module("headwater.bench")
    known = sorted(
        entry.name
        for entry in pkgutil.iter_modules(package.__path__)
        if not entry.name.startswith("_")
    )
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_bench_help(known))
        return 0
    name = arguments[0]
    if name not in known:
        return _fail(f"unknown benchmark {name!r}{suggest(name, known)}", code=2)
    run: Callable[[Sequence[str]], int | None] = importlib.import_module(
        f"headwater.bench.{name}"
    ).main
    return run(arguments[1:]) or 0


def _bench_help(known: Sequence[str]) -> str:
    """One line for each benchmark: the first sentence of its module, read without importing
    it."""
    lines = ["usage: headwater bench NAME [flags]; NAME --help has the flags", ""]
    for name in known:
        found = importlib.util.find_spec(f"headwater.bench.{name}")
        assert found is not None, "it was just listed"
        assert found.origin is not None, "a benchmark is a file"
        about = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8")))
        sentence = " ".join((about or "").partition("\n\n")[0].split())
        lines.append(f"  {name:10}{sentence.split(': ', 1)[-1]}")
    return "\n".join(lines) + "\n"


def _guard(run: Callable[[], int]) -> int:
    """Run a command. Errors of our own classes are printed as a sentence, without a
    traceback."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has closed it. Python flushes once more at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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


def _unknown(unknown: Sequence[str], options: Namespace) -> str:
    first = unknown[0].partition("=")[0]
    if options.command == "serve" and (sentence := explain(first)) is not None:
        return f"{first}: {sentence}"
    kind = "flag" if first.startswith("-") else "argument"
    return f"unknown {kind} {first!r}{suggest(first, options.flags)}"


def _fail(sentence: str, *, code: int = 1) -> int:
    sys.stderr.write(f"headwater: error: {sentence}\n")
    return code
