"""The documentation is correct: links have targets, commands run, flags exist.

A code block with commands has a marker in the line before it:

    <!-- run -->           its commands are executed here, in order, beside a live server
    <!-- needs: WHAT -->   not executed: hardware, another machine, minutes; still read by the
                           real command line, so that no flag in it can rot
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.cli.parser import build_parser
from tests.e2e.live import LiveServer

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
COMMANDS = ("headwater", "curl", "bash", "python", "pip", "docker", "systemctl", ".", "export")
SHELLS = ("", "bash", "sh", "console")
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_MARK = re.compile(r"<!-- (run|needs: \S.*) -->$")


@dataclass(frozen=True)
class Block:
    """A code block with commands."""

    page: Path
    line: int
    mark: str | None
    lines: tuple[str, ...]

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def commands_of(text):
    """Lines with their continuations, without prompts and output."""
    whole = re.sub(r"\\\n\s*", "", text)
    lines = whole.splitlines()
    if any(line.startswith("$ ") for line in lines):  # the other lines are output
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return tuple(line for line in lines if line.strip() and not line.startswith("#"))


def blocks_of(page):
    text = page.read_text()
    for found in _FENCE.finditer(text):
        lines = commands_of(found[2])
        words = [line.split()[0] for line in lines if line.split()]
        if found[1] in SHELLS and any(word in COMMANDS for word in words):
            before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
            mark = _MARK.match(before)
            line = text.count("\n", 0, found.start()) + 1
            yield Block(page, line, mark and mark[1], lines)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def anchors(page):
    """The possible anchors of a link to this page."""
    heads = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_have_a_target(page):
    """Targets are files and headings of this project; external links are not checked."""
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading {anchor}"


def test_the_table_of_contents_has_every_page():
    """Every page is listed, tutorials too."""
    listed = set(_LINK.findall((ROOT / "docs" / "index.md").read_text()))
    folder = ROOT / "docs"
    pages = {str(page.relative_to(folder)) for page in folder.glob("*.md")}
    pages |= {str(page.relative_to(folder)) for page in folder.glob("tutorials/*.md")}
    assert pages - {"index.md"} <= listed


def test_the_list_of_decisions_has_every_record():
    """A record that is not listed would not be in the site."""
    folder = ROOT / "docs" / "decisions"
    listed = set(_LINK.findall((folder / "index.md").read_text()))
    assert {page.name for page in folder.glob("0*.md")} == listed


@pytest.mark.slow
def test_every_lesson_is_named_by_a_test():
    """The numbers on the page are those that tests name, except lessons that are kept by
    review."""
    page = (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8")
    listed = {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}
    items = re.split(r"^(?=\d+\. )", page, flags=re.MULTILINE)
    reviewed = {int(item.split(".")[0]) for item in items if "(Kept by review.)" in item}
    named: set[int] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for numbers in re.findall(
            r"\blessons? (\d+(?:(?:, | to | and )\d+)*)",
            path.read_text(encoding="utf-8"),
            re.IGNORECASE,
        ):
            named |= {int(number) for number in re.findall(r"\d+", numbers)}
    assert listed == set(range(1, 91))
    assert named <= listed
    assert named | reviewed == listed


def test_the_site_is_built_with_strict_links(tmp_path):
    """`scripts/docs` builds the site with the same configuration; nothing is loaded from other
    hosts."""
    pytest.importorskip("material", reason="pip install 'headwater[docs]'")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "index.html").read_text()
    assert "fonts.googleapis.com" not in home
    assert (tmp_path / "search" / "search_index.js").exists()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_command_of_a_page_is_run_or_has_a_reason(block):
    """Every block with commands has a marker before it, and only flags that exist."""
    assert block.mark, f"{block}: write <!-- run --> or <!-- needs: WHAT --> before it"
    for line in block.lines:
        words = shlex.split(line.partition(" #")[0], comments=True)
        if words[:1] != ["headwater"] or words[1:2] == ["bench"] or "|" in words:
            continue
        if "--help" in words:
            continue
        options, unknown = build_parser().parse_known_args(
            [re.sub(r"^[A-Z]+$", "/x", word) for word in words[1:] if word not in ("&", "...")]
        )
        assert not [word for word in unknown if word.startswith("-")], f"{block}: {line}"
        assert options.command or "--version" in words


@pytest.fixture(scope="module")
def server():
    server = LiveServer("--max-model-len", "4096").wait_ready()
    yield server
    assert server.stop() == 0, server.errors


SCRIPT = """\
set -euo pipefail
curl() {{ command curl -sS --fail-with-body --max-time 60 "$@"; }}
python() {{ {python} "$@"; }}
headwater() {{ if [ "$1" = serve ]; then {python} {serve} "$@"; else {python} -m headwater "$@"; fi; }}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    sorted({block.page for block in BLOCKS if block.mark == "run"}),
    ids=lambda p: p.name,
)
def test_every_command_marked_so_runs(page, server, tmp_path):
    """There is one shell per page, as a reader would type it; only the port differs."""
    script = SCRIPT.format(python=sys.executable, serve="-m tests.serve_once")
    for block in BLOCKS:
        if block.page == page and block.mark == "run":
            script += "\n".join(block.lines) + "\n"
    for address in ("http://127.0.0.1:8000", "http://localhost:8000", "localhost:8000"):
        script = script.replace(address, server.url)
    env = {name: v for name, v in os.environ.items() if name != "HEADWATER_API_KEY"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env.get("PYTHONPATH", "")))
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            printed, _ = shell.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            raise
    assert shell.returncode == 0, printed
