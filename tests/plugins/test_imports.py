"""The storage plug-ins need nothing that `pip install headwater` does not bring."""

import subprocess
import sys

import pytest

from tests.plugins.doubles.finder import is_real

EXTRAS = (
    "torch",
    "transformers",
    "msgspec",
    "zmq",
    "starlette",
    "uvicorn",
    "tokenizers",
    "aiohttp",
)

SCRIPT = """
import sys
for name in {extras!r}:
    sys.modules[name] = None
from tests.plugins.doubles import sglang_double, vllm_double
from tests.plugins.doubles.finder import install_double
install_double("vllm", "vllm", "0.32.0", vllm_double)
install_double("sglang", "sglang", "0.5.23", sglang_double)
import headwater.plugins.sglang, headwater.plugins.vllm.connector
import headwater.plugins.vllm.policy, headwater.plugins.vllm.tier
"""


@pytest.mark.skipif(is_real("vllm") or is_real("sglang"), reason="the engine imports torch")
def test_storage_plugins_import_without_torch_and_without_headwaters_extras():
    """vLLM and SGLang bring torch; the plug-ins import none of it when they are loaded."""
    subprocess.run([sys.executable, "-c", SCRIPT.format(extras=EXTRAS)], check=True)
