"""The command line of a benchmark, with the same checks and suggestions as every other
command."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from headwater.words import suggest


def read_flags(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """The options. An unknown flag ends the program with a suggestion and exit code 2."""
    parser.allow_abbrev = False
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        given = unknown[0].partition("=")[0]
        flags = [flag for action in parser._actions for flag in action.option_strings]
        kind = "flag" if given.startswith("-") else "argument"
        parser.error(f"unknown {kind} {given!r}{suggest(given, flags)}")
    return options
