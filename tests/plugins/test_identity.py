"""Blocks of different deployments are never confused."""

import dataclasses

import numpy as np
import pytest

from headwater.errors import ConfigError
from headwater.plugins.identity import BlockIdentity, identify_weights, key_path, storage_keys
from headwater.plugins.versions import require_tested
from headwater.types import BlockKey

KNOWN = BlockIdentity(
    engine="vllm 0.32.0",
    weights="content:aa",
    dtype="bfloat16",
    layout="NHD",
    shard="rank 0 of 2",
    block_tokens="16",
    hashing="sha256 seed 0",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KNOWN)])
def test_a_change_of_any_field_changes_every_key(field):
    """Another revision, element type, layout, rank, block size or seed finds nothing."""
    other = dataclasses.replace(KNOWN, **{field: "another"})

    assert other.fingerprint() != KNOWN.fingerprint()
    assert storage_keys(other.fingerprint(), [b"h"]) != storage_keys(
        KNOWN.fingerprint(), [b"h"]
    )


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KNOWN)])
@pytest.mark.parametrize("value", ["", "auto", "None"])
def test_an_unknown_field_is_refused_by_name(field, value):
    """The message says which part of the identity is missing."""
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(KNOWN, **{field: value})


def test_a_model_directory_is_named_by_its_content(tmp_path, monkeypatch):
    """The same files elsewhere have the same name; one changed byte gives another."""
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, weights in zip(folders, (b"x", b"x", b"y"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)

    a, b, c = (identify_weights(str(folder), None, None) for folder in folders)

    assert a == b != c


def test_a_hub_name_needs_a_commit(tmp_path):
    """A branch can move, so its commit is read from the local cache, or the start is refused."""
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    environ = {"HF_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="revision of the weights of 'org/name' is not known"):
        identify_weights("org/name", None, None, environ)
    (refs / "main").write_text(COMMIT)

    assert identify_weights("org/name", None, None, environ) == f"commit:{COMMIT}"
    assert identify_weights("org/name", "f" * 40, None, environ) == f"commit:{'f' * 40}"
    assert identify_weights("org/name", None, "mine", environ) == "given:mine"


def test_a_directory_without_safetensors_needs_a_name(tmp_path):
    """Weights that cannot be hashed must be named by the operator."""
    with pytest.raises(ConfigError, match="weights"):
        identify_weights(str(tmp_path), None, None)


def test_a_path_of_keys_has_the_tokens_of_the_real_blocks():
    """Eviction policies count tokens, so a block of keys is as long as the real one."""
    keys = [BlockKey(bytes([n]) * 32) for n in range(3)]

    path = key_path(keys, 16)

    assert path.num_blocks(16) == 3
    assert path.tokens.reshape(3, 16)[:, :8].tobytes() == b"".join(keys)
    assert not np.any(path.tokens.reshape(3, 16)[:, 8:])
    with pytest.raises(ConfigError, match="too small"):
        key_path(keys, 4)


def test_an_untested_version_is_refused_with_what_to_do(monkeypatch):
    """The message names the tested version and the override."""
    with pytest.raises(ConfigError, match=r"0\.99\.0 is installed.*allow_untested"):
        require_tested("vllm", installed="0.99.0")
    assert require_tested("vllm", installed="0.99.0", allow_untested=True) == "0.99.0"
    assert require_tested("vllm", installed="0.32.0+cpu") == "0.32.0"
    monkeypatch.setenv("HEADWATER_ALLOW_UNTESTED", "1")
    assert require_tested("vllm", installed="0.99.0") == "0.99.0"
