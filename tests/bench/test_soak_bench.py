"""`headwater bench soak` ends without violated invariants, and a seed repeats the same
round."""

import json

import pytest

from headwater.bench.soak import run_round
from headwater.cli import main


def test_a_short_soak_ends_well(capsys):
    """Lessons 20, 24, 44, 50: whatever failed, there is no wrong token and no lost slot."""
    assert main(["bench", "soak", "--minutes", "0", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["wrong_tokens"] == 0
    assert result["rounds"] == 1


@pytest.mark.slow
def test_a_soak_of_the_built_in_model_ends_well(capsys):
    """Cached equals uncached also with real attention, real copies, and threads that fail."""
    assert main(["bench", "soak", "--model", "tiny", "--minutes", "0", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["wrong_tokens"] == 0
    assert result["requests"] >= 10


def test_the_same_seed_gives_the_same_round():
    """A failed round can be repeated."""
    assert run_round(2) == run_round(2)
