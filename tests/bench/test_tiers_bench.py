"""`headwater bench tiers` prints the documented figures."""

import json

import pytest

from headwater.cli import main

pytestmark = pytest.mark.slow


def test_json_has_the_promised_keys(capsys):
    """One JSON object on standard output with every tier and every direction."""
    assert main(["bench", "tiers", "--quick", "--pairs", "1", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    for name in ("all_miss_loss", "all_miss_loss_write_through"):
        assert result[f"{name}_ci95"]["low"] <= result[name] <= result[f"{name}_ci95"]["high"]
    assert result["convoy_ratio"] > 0
    assert set(result["recompute_ttft_ms"]) == {"256", "512"}
    assert {"host", "file"} <= set(result["hit_ttft_ms"])
    for tier in result["hit_ttft_ms"].values():
        assert all(tier[length] > 0 for length in ("256", "512"))
    assert {"memory", "file"} <= set(result["backend_ratio"])
    for ways in result["backend_ratio"].values():
        assert set(ways) == {"write", "read"}
    assert set(result["hung_ttft_ratio"]) == {"control", "memory contains", "memory write"}
    assert result["hung_lost_slots"] == {"memory contains": 0, "memory write": 0}
    assert result["hung_breakers"]["memory contains"] == "open / closed"
    assert result["hung_breakers"]["memory write"] in ("closed / open", "closed / half_open")
