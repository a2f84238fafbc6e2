"""Words that were replaced by field terms do not come back."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sorted(p for top in ("src", "tests", "benchmarks") for p in (ROOT / top).rglob("*.py"))
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
]

CLASSES = re.compile(
    r"Roster|Holdings|Intake|Flight|Rides?|Riders|Quiet|Loads|Below|Background|Question|Shelf|Facts|"
    r"Known|Duel|Asked|Past|Seen|ApartBlocks|Announcements|Ending|Outcome|Extent|Look|Sight|"
    r"Forgotten|Pace|Hands|Exchange|Ways|Loans|Lobby|Pledges|Dock|Cells|Reception|Places|Said|"
    r"SaidChoice|Gone|Hearing|Chooser|Trials|Gate|Lanes|Kept|Rig"
)
"""Class names that tell nothing to a reader who knows vLLM or SGLang."""

NAMES = re.compile(
    r"coast|stir|LEAVING|wishes|land|said|facts?|computes_here|skinny|ladder|rigs?|plays?|lobby|"
    r"tickets?|pledges|riders|roster|holdings"
)
"""Names of functions, variables and attributes that were replaced."""

WORDS = re.compile(
    r"\b(roster|holdings|riders?|coasting|shelf|shelves|duel|wishes|lobby|tickets?|pledges?|"
    r"reception|computes_here|skinny|ladders?|turned around|plays|rigs?|"
    r"whoever|whomever|nobody|somebody)\b",
    re.IGNORECASE,
)
"""Words that sentences of the code and of the documentation do not use."""

HERE = Path(__file__)
ABOUT_WORDS = {HERE, ROOT / "tests" / "test_errors.py"}


def test_no_replaced_name_is_used_as_an_identifier():
    """docs/glossary.md has the terms to use instead."""
    maybe = re.compile(rf"\b_*({CLASSES.pattern}|{NAMES.pattern})\b")
    used = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}"
        for path in PYTHON
        if maybe.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        for name in names_of(node)
        if NAMES.fullmatch(name) or (isinstance(node, ast.ClassDef) and CLASSES.fullmatch(name))
    ]

    assert used == []


def names_of(node):
    """The names that a node of the syntax tree defines or uses."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name.lstrip("_")]
        case ast.Name():
            return [node.id.lstrip("_")]
        case ast.Attribute():
            return [node.attr.lstrip("_")]
        case ast.arg():
            return [node.arg.lstrip("_")]
    return []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_use_plain_words(path):
    """A page uses field terms, and names an actor instead of an unknown person."""
    assert found_in(path) == []


def test_docstrings_and_comments_use_plain_words():
    """Docstrings, comments and messages in code use field terms, too."""
    found = [hit for path in PYTHON if path not in ABOUT_WORDS for hit in found_in(path)]

    assert found == []


def found_in(path):
    """Hits in one file, as `path:line word`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if WORDS.search(text) else []
    return [
        f"{path.relative_to(ROOT)}:{number} {hit.group()}"
        for number, line in enumerate(lines, start=1)
        for hit in WORDS.finditer(line)
    ]
