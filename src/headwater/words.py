"""Suggests the known name that is most similar to an unknown one."""

import difflib
from collections.abc import Iterable


def suggest(given: str, known: Iterable[str]) -> str:
    """The end of an error message about `given`: the most similar name, or all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    listed = ", ".join(name for name in known if not name.startswith("-"))
    return f"; known: {listed}" if listed else "; see --help"
