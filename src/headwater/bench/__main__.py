"""`python -m headwater.bench NAME …`: runs a benchmark without the libraries of the server."""

import importlib
import importlib.util
import sys

from headwater.errors import HeadwaterError


def main(arguments: list[str]) -> int:
    """Run one benchmark; return the exit code."""
    name = arguments[0] if arguments else ""
    known = name.isidentifier() and not name.startswith("_")
    if not known or importlib.util.find_spec(f"headwater.bench.{name}") is None:
        sys.stderr.write("usage: python -m headwater.bench NAME ...\n")
        return 2
    try:
        code: int = importlib.import_module(f"headwater.bench.{name}").main(arguments[1:])
    except HeadwaterError as error:
        sys.stderr.write(f"headwater: error: {error}\n")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
