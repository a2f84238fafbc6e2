"""Rules a linter cannot see: what imports what, and how large a file may get."""

import subprocess
import sys
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
