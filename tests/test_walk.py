"""The number of files that one request, one block and one hand-off cross is bounded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MOST = {"chat": (43, 310), "block": (51, 1300), "handoff": (39, 860)}
"""Files and crossings that `scripts/walk` may count. Lower them when the code gets simpler."""


@pytest.fixture(scope="module")
def walks():
    command = [sys.executable, "scripts/walk", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MOST)
def test_a_walk_stays_within_its_bound(walks, name):
    """Files and crossings do not grow without a decision."""
    num_files, num_crossings = len(walks[name]["files"]), walks[name]["num_crossings"]
    assert (num_files <= MOST[name][0], num_crossings <= MOST[name][1]) == (True, True), (
        f"{name}: {num_files} files, {num_crossings} crossings; at most {MOST[name]}. "
        f"See `python scripts/walk {name} --files --pairs`."
    )


def test_a_walk_reaches_the_layers_it_is_about(walks):
    """Each walk does real work: it enters the packages it is about."""
    expected = {
        "chat": {"server", "engine", "scheduler", "cache"},
        "block": {"engine", "scheduler", "cache", "transfer", "storage"},
        "handoff": {"engine", "scheduler", "cache", "disagg"},
    }
    for name, packages in expected.items():
        assert packages <= {file.partition("/")[0] for file in walks[name]["files"]}


def test_the_architecture_page_has_the_bounds():
    """docs/architecture.md shows the numbers that are checked here."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\w+): [^|]*\| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    numbers = {name: tuple(int(n.replace(",", "")) for n in pair) for name, *pair in shown}
    assert numbers == MOST
