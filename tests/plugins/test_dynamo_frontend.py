"""Dynamo's frontend with KV routing before two Headwater workers, compared with Headwater's
router.

Only where Dynamo is installed; scripts/test-plugins does that.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.doubles.finder import is_real

pytestmark = [
    pytest.mark.skipif(not is_real("dynamo"), reason="ai-dynamo is not installed"),
    pytest.mark.timeout(3600),
]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dynamo_router.py"


def test_dynamos_router_finds_what_headwaters_router_finds():
    """Multi-turn conversations go through both routers, with the flags of docs/plugins.md.
    Dynamo sees the workers' KV events and sends a conversation to where its prefix is."""
    command = [sys.executable, str(SCRIPT), "--rounds", "3"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as benchmark:
        try:
            output, errors = benchmark.communicate(timeout=1800)
        except subprocess.TimeoutExpired:
            benchmark.terminate()  # unlike SIGKILL, this ends its workers, too
            raise
    assert benchmark.returncode == 0, errors[-2000:]

    [found] = json.loads(output.splitlines()[-1])

    assert found["headwater"] > 0.5
    assert found["ratio"] >= 0.97
