"""The fingerprint: a content hash, computed once."""

import os
import shutil
from pathlib import Path

import pytest

from headwater.device.builtin import LlamaShape, make_llama
from headwater.device.fingerprint import fingerprint
from headwater.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = LlamaShape(layers=1, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8)
    return make_llama(tmp_path / "model", shape)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_changed_byte_is_another_model(folder: Path, name: str) -> None:
    """Weights and config both count (lesson 39)."""
    before = fingerprint(folder)
    flip(folder / name, -3)

    assert fingerprint(folder) != before
    assert len(before) == 32


def test_a_copied_folder_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    """The location is not part of the identity."""
    shutil.copytree(folder, tmp_path / "elsewhere")

    assert fingerprint(tmp_path / "elsewhere") == fingerprint(folder)


def test_a_fingerprint_is_remembered_by_file_sizes_and_times(folder: Path) -> None:
    """The weights are not read again: a change that keeps size and time is not noticed."""
    weights = folder / "model.safetensors"
    stamp = weights.stat()
    before = fingerprint(folder)
    flip(weights, -1)

    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert fingerprint(folder) == before

    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert fingerprint(folder) != before


def test_weights_are_hashed_again_if_the_stored_fingerprint_is_damaged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged cache file changes no fingerprint: the weights are hashed again."""
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    before = fingerprint(folder)
    (note,) = (tmp_path / "cache" / "fingerprints").iterdir()

    for damage in ("", "{", "[]", '{"files": 1, "fingerprint": "zz"}'):
        note.write_text(damage)
        assert fingerprint(folder) == before


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    """The message says what is missing."""
    with pytest.raises(ModelError, match=r"config\.json"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="safetensors"):
        fingerprint(tmp_path)
