"""Client libraries of agents, unmodified, against a live server on the built-in model."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("HEADWATER_CLIENTS", ROOT / ".venv-clients"))
CLIENTS = sorted(path.stem for path in (ROOT / "tests" / "clients").glob("*_client.py"))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_completes_its_tool_loop(server, client):
    """The loop has forced calls, their results in the history, streams and structured
    output."""
    own = VENV / client.removesuffix("_client")
    python = (own if own.exists() else VENV) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no client libraries in {VENV}; run: bash scripts/clients")
    done = subprocess.run(
        [python, ROOT / "tests" / "clients" / f"{client}.py", server.url],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
