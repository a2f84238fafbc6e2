"""The fingerprint of a model: a hash of its weights and config, computed once.

Two folders with the same bytes have the same fingerprint; a changed byte changes it. The
hash is remembered in the user's cache folder under the files' names, sizes and times, so
that a large model is read for it only once.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from headwater.errors import ModelError
from headwater.native.folder import cache_folder, write_whole

_DOMAIN = b"headwater model fingerprint 1\0"


def fingerprint(model_dir: Path) -> bytes:
    """32 bytes that identify the weights and config in `model_dir`."""
    files = identity_files(model_dir)
    stamp = [[f.name, s.st_size, s.st_mtime_ns] for f, s in ((f, f.stat()) for f in files)]
    note = _note_path(model_dir)
    known = _remembered(note, stamp)
    if known is not None:
        return known
    digest = _content_hash(files)
    # If the cache folder cannot be written, the model is hashed again next time.
    with suppress(OSError):
        write_whole(note, json.dumps({"files": stamp, "fingerprint": digest.hex()}))
    return digest


def identity_files(model_dir: Path) -> list[Path]:
    """The files that identify a model. Raises ModelError if they are missing."""
    weights = sorted(model_dir.glob("*.safetensors"))
    config = model_dir / "config.json"
    if not config.is_file():
        raise ModelError(f"{model_dir} has no config.json; use a complete model folder")
    if not weights:
        raise ModelError(
            f"{model_dir} has no .safetensors weights; use a complete model folder"
        )
    return [config, *weights]


def _note_path(model_dir: Path) -> Path:
    place = hashlib.sha256(os.fsencode(model_dir.resolve())).hexdigest()[:32]
    return cache_folder() / "fingerprints" / f"{place}.json"


def _remembered(note: Path, stamp: list[list[object]]) -> bytes | None:
    """The stored fingerprint, if it belongs to exactly these files; otherwise None."""
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
        if content["files"] != stamp:
            return None
        digest = bytes.fromhex(content["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == 32 else None


def _content_hash(files: list[Path]) -> bytes:
    whole = hashlib.sha256(_DOMAIN)
    for path in files:
        name = path.name.encode()
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        whole.update(len(name).to_bytes(4, "little") + name + content)
    return whole.digest()
