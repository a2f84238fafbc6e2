"""The threat table of docs/security.md names a test for each row, and the test exists."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"


def test_every_threat_names_a_test_that_exists():
    """A row whose test was renamed or removed is found here."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index("| threat |") :].splitlines()[2:]
    rows = lines[: next(at for at, line in enumerate(lines) if not line.startswith("|"))]

    assert len(rows) > 20
    for row in rows:
        found = re.search(r"`([\w/]+\.py)::(test_\w+)` \|$", row)
        assert found is not None, row
        file, name = found.groups()
        assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), row
