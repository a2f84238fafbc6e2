"""Rules a linter cannot see: what imports what, and how large a file may get."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "headwater"
LONGEST = 400


def test_the_core_imports_without_torch_and_without_server_libraries():
    """Cache, scheduler and loop start on a machine that has numpy only."""
    absent = ("torch", "transformers", "msgspec", "zmq", "starlette", "uvicorn", "tokenizers")
    script = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    script += "import headwater, headwater.cli, headwater.cache, headwater.scheduler\n"
    script += "import headwater.engine.core, headwater.bench.cache, headwater.testing.runners\n"

    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.name)
def test_a_module_says_what_it_is_for_and_stays_short(path):
    """Above the limit a file has a second noun in it."""
    text = path.read_text()

    assert len(text.splitlines()) <= LONGEST
    assert path.name == "__init__.py" or text.startswith(('"""', "#!"))


def test_a_public_class_name_is_defined_once():
    """One name, one thing: a reader who searches for a class finds one definition."""
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))

    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
