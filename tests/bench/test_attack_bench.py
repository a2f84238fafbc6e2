"""`headwater bench attack`, for some seconds."""

import json

import pytest

from headwater.cli import main


@pytest.mark.slow
def test_a_cluster_withstands_hostile_bytes(capsys):
    """No process ends, nothing hangs, and no response has a status of 500 or above except
    503."""
    assert main(["bench", "attack", "--minutes", "0.1", "--json"]) == 0, capsys.readouterr()

    result = json.loads(capsys.readouterr().out)
    assert result["faults"] == 0
    assert result["listeners"] >= 9
    assert result["attacks"] > 20
