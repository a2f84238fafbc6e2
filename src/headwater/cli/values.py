"""Parsing of numbers and formatting of help texts."""

import math
from argparse import ArgumentTypeError


def number_value(text: str) -> float:
    """A finite number; Python would also accept `nan` and `inf`."""
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a number")
    return value


def help_text(text: str) -> str:
    return f"{text} (default: %(default)s)"
