"""Weights of the session policy in files: shipped, saved, loaded; never evaluated on their own
traces."""

import json
from pathlib import Path

import numpy as np
import pytest

from headwater.bench._shapes import make_shape
from headwater.cache import CacheConfig
from headwater.cache.policy.hazard import HazardModel
from headwater.cache.policy.retention import Retention
from headwater.cache.policy.traits import NUM_FEATURES, NUM_UNHINTED, PRIORS
from headwater.cache.policy.weights import Weights
from headwater.cli import main
from headwater.cli.idle_flags import idle_settings
from headwater.config import EngineConfig
from headwater.errors import ConfigError
from headwater.launch.weights import load_weights, save_learned, save_weights
from headwater.replay.cache_only import replay_cache


def write_trace(path, seed, limit=400):
    """A trace file of made sessions."""
    rows = [
        {
            "timestamp": request.arrival_s * 1e3,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        for request in make_shape("mixed", limit, seed)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_shipped_weights_are_there_and_say_where_they_come_from():
    """The shipped weights were learned from two public traces, are small, and are read from the
    package."""
    weights = load_weights("shipped")

    assert weights is not None
    assert len(weights.learned_from) == 2
    assert np.abs(weights.features).max() > 0.1
    assert load_weights("none") is None


def test_a_policy_begins_with_half_of_each_weight_and_with_fresh_step_sizes():
    """The policy starts with what was learned elsewhere, and learns as fast as a policy without
    initial weights."""
    weights = load_weights("shipped")
    assert weights is not None
    fresh = HazardModel(NUM_FEATURES, NUM_UNHINTED, PRIORS)
    taught = Retention(64, weights=weights).hazards

    assert taught.bias == pytest.approx((fresh.bias + weights.bias) / 2)
    assert taught.weights == pytest.approx((fresh.weights + weights.features) / 2)
    assert (taught._squares == 1).all()
    assert (taught._bias_squares == 1).all()


def test_saved_weights_can_be_loaded(tmp_path):
    """A file has a few digits of each weight and the traces they were learned from, and is
    loaded unchanged."""
    requests = make_shape("mixed", 600, 2)
    learned = replay_cache(requests, 300, eviction="session").learned
    assert learned is not None
    trace, file = write_trace(tmp_path / "trace.jsonl", 2), tmp_path / "weights.json"
    before = Weights(bias=learned.bias, features=learned.features, learned_from=("older",))
    save_learned(learned, file, before=before, trace=trace)
    again = load_weights(str(file))

    assert again is not None
    assert again.features == pytest.approx(learned.features, abs=1e-4)
    assert again.learned_from[0] == "older"
    assert len(again.learned_from) == 2
    assert file.stat().st_size < 1 << 14


def test_weights_are_not_reported_on_what_they_were_learned_from(tmp_path, capsys):
    """`headwater bench eviction` refuses the traces of a weights file and their variants, and
    accepts any other."""
    own = write_trace(tmp_path / "own.jsonl", 4)
    other = write_trace(tmp_path / "other.jsonl", 5)
    file = tmp_path / "weights.json"
    save = ["--cache-only", "--eviction", "session", "--save-weights", str(file), "--json"]
    assert main(["replay", str(own), *save]) == 0
    capsys.readouterr()
    bench = ["bench", "eviction", "--capacity", "100", "--weights", str(file), "--json"]

    assert main([*bench, "--trace", str(own), "--variant", "second-half"]) == 1
    assert "learned from" in capsys.readouterr().err
    assert main([*bench, "--trace", str(other)]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == str(file)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "learned_from": []}']
)
def test_a_file_without_weights_gets_a_message(tmp_path, text):
    """A missing file is also an error message."""
    file = tmp_path / "weights.json"
    file.write_text(text)
    for name in (str(file), str(tmp_path / "absent.json")):
        with pytest.raises(ConfigError, match="--weights"):
            load_weights(name)


def test_weights_of_another_shape_or_without_numbers_are_refused(tmp_path):
    """A file of an older release does not fit; NaN would spread."""
    good = load_weights("shipped")
    assert good is not None
    file = tmp_path / "weights.json"
    save_weights(good, file)
    saved = json.loads(file.read_text())
    for change in ({"bias": [0.0]}, {"bias": [float("nan")] * len(saved["bias"])}):
        file.write_text(json.dumps(saved | change))
        with pytest.raises(ConfigError, match="bias"):
            load_weights(str(file))
    with pytest.raises(ConfigError, match="session policy"):
        CacheConfig(device_blocks=8, weights=good)


def test_only_a_policy_that_learns_can_save(tmp_path, capsys):
    """`--save-weights` with an LRU is an error, not an empty file."""
    trace = write_trace(tmp_path / "trace.jsonl", 1, limit=5)
    file = Path(tmp_path / "weights.json")

    assert main(["replay", str(trace), "--cache-only", "--save-weights", str(file)]) == 1
    assert "--eviction session" in capsys.readouterr().err
    assert not file.exists()


def test_flags_without_effect_print_a_note():
    """Weights without a policy that uses them, and prefetch without a host tier, are noted."""
    given = frozenset({"--eviction-weights", "--no-prefetch-sessions"})
    idle = idle_settings(EngineConfig(), given)

    assert [sentence.split()[0] for sentence in idle] == sorted(given)
    assert idle_settings(EngineConfig(eviction="session", swap_space_gib=1.0), given) == []
    with pytest.raises(ConfigError, match="--hint-budget"):
        EngineConfig(hint_budget=1.5)
