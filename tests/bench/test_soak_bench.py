"""`headwater bench soak`: ends with books balanced, and a seed plays the same round again."""

import json

from headwater.bench.soak import play
from headwater.cli import main


def test_a_short_soak_ends_well(capsys):
    """Lessons 20, 24, 44, 50: no wrong token, every slot back, whatever failed."""
    assert main(["bench", "soak", "--minutes", "0", "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["wrong_tokens"] == 0
    assert result["rounds"] == 1


def test_a_seed_is_a_round():
    """What failed once can be played again."""
    assert play(2) == play(2)
