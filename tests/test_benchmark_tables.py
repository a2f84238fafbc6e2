"""docs/benchmarks.md and the result files in benchmarks/results agree."""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_page_has_the_figures_of_the_files():
    """Figures are changed in a result file, never in the page alone."""
    command = [sys.executable, "scripts/benchmark-tables", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_file_is_shown():
    """Every measured figure is on the page, including bad ones."""
    shown = set(re.findall(r"<!-- results: ([\w-]+) -->", PAGE.read_text(encoding="utf-8")))
    assert shown == {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_file_says_where_its_figures_come_from(file):
    """A result file has the command, machine, date, and the measured commit or the commit that
    recorded them."""
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["command"]
    assert result["machine"]
    assert date.fromisoformat(result["date"]).year >= 2026
    assert result["commit"] or result["recorded_in"]
    assert all(len(row) == len(result["columns"]) for row in result["rows"])
