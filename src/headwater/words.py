"""What was probably meant by a name that nobody knows."""

import difflib
from collections.abc import Iterable


def suggest(given: str, known: Iterable[str]) -> str:
    """The end of a sentence about `given`: the name that is like it, or all there are."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    listed = ", ".join(name for name in known if not name.startswith("-"))
    return f"; known: {listed}" if listed else "; see --help"
