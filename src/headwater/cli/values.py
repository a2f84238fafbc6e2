"""What the parsers of all commands share: the command itself, numbers and help texts."""

import math
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
    _SubParsersAction,
)


def add_command(
    commands: "_SubParsersAction[ArgumentParser]", usage: str, about: str
) -> ArgumentParser:
    """Add a command to the parser of `headwater`. Its usage begins with its name."""
    return commands.add_parser(
        usage.split()[0],
        usage=f"headwater {usage}",
        description=about,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def number_value(text: str) -> float:
    """A finite number; Python would also accept `nan` and `inf`."""
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def help_text(text: str) -> str:
    return f"{text} (default: %(default)s)"
