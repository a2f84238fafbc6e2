"""Every plug-in refuses versions of its engine that it was not tested with."""

import asyncio
from types import SimpleNamespace

import pytest

from headwater.errors import ConfigError
from headwater.plugins import versions
from headwater.plugins.dynamo.engine import HeadwaterEngine
from headwater.plugins.sglang import HeadwaterHiCache
from headwater.plugins.vllm.connector_config import ConnectorConfig
from headwater.plugins.vllm.policy import SessionCachePolicy
from headwater.plugins.vllm.tier import HeadwaterTier
from tests.plugins.doubles.finder import is_real


def make_tier():
    HeadwaterTier(SimpleNamespace(config=None), memoryview(bytearray(16)), "t")


def make_connector():
    ConnectorConfig.read(
        SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute")
    )


PLUGINS = {
    "vllm tier": make_tier,
    "vllm policy": lambda: SessionCachePolicy(8),
    "vllm connector": make_connector,
    "sglang": lambda: HeadwaterHiCache(SimpleNamespace(extra_config={})),
    "dynamo": lambda: asyncio.run(HeadwaterEngine.from_args(["model"])),
}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_refuses_an_untested_version_at_its_start(monkeypatch, name):
    """The message names the tested version and what to do."""
    tested = {"vllm": ("9.9.9",), "sglang": ("9.9.9",), "ai-dynamo": ("9.9.9",)}
    monkeypatch.setattr(versions, "TESTED", tested)
    package = name.split()[0]
    if not is_real(package) and any(map(is_real, ("vllm", "sglang", "dynamo"))):
        pytest.skip(f"{package} is in an environment of its own")

    with pytest.raises(
        ConfigError, match=r"tested with \S+ 9\.9\.9.*HEADWATER_ALLOW_UNTESTED=1"
    ):
        PLUGINS[name]()
