"""The identity of another engine's blocks: everything that determines their bytes, or a
refusal.

Blocks outlive a process and are shared between machines. Two deployments that differ in
weights, element type, layout, parallel size, block size or hashing must never find each other's
blocks. So every field below must be known; if one is not, the plug-in does not start.
"""

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from headwater.cache.keys import TokenPath
from headwater.device.fingerprint import fingerprint
from headwater.errors import ConfigError, ModelError
from headwater.types import BlockKey

_DOMAIN = b"headwater/plugin-identity/1"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_KEY_WORDS = 8
"""A key of 32 bytes is eight 32-bit words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIdentity:
    """Everything except the tokens that determines the bytes of a block."""

    engine: str
    """Name and version of the engine that wrote the bytes."""

    weights: str
    """The weights' revision or content; see `identify_weights`."""

    dtype: str
    """Element type of the KV cache."""

    layout: str
    """Order of the bytes inside a block: layers, their shapes, the attention's layout."""

    shard: str
    """The rank that wrote the bytes, and the parallel sizes of its engine."""

    block_tokens: str
    """Tokens in a block, and in a hash if that differs."""

    hashing: str
    """How the engine hashes tokens: algorithm and seed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value or value in ("None", "auto", "unknown"):
                raise ConfigError(
                    f"the identity of the KV cache is not complete: {field.name} is unknown "
                    f"({value!r}), so its blocks could be mistaken for others. Set it "
                    'explicitly in the engine, or name the weights with "weights"'
                )

    def fingerprint(self) -> bytes:
        """32 bytes that differ if any field differs."""
        digest = hashlib.sha256(_DOMAIN)
        for field in fields(self):
            value = getattr(self, field.name).encode()
            # Each value has its length before it, so no two lists of fields have the same
            # encoding.
            digest.update(struct.pack("<I", len(value)) + value)
        return digest.digest()


def identify_weights(
    model: str, revision: str | None, given: str | None, environ: Mapping[str, str] = os.environ
) -> str:
    """A name for the weights of `model`: given by the operator, a commit, or a hash of their
    content. Raises ConfigError if none is known. A directory is hashed once; the hash is
    remembered."""
    if given:
        return f"given:{given}"
    folder = Path(model)
    if folder.is_dir():
        if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
            return f"commit:{folder.name}"
        try:
            return f"content:{fingerprint(folder).hex()}"
        except ModelError as error:
            raise ConfigError(
                f'{error}, so its weights cannot be identified; set "weights" to a name that '
                "changes whenever the weights change"
            ) from error
    commit = revision if revision and _COMMIT.fullmatch(revision) else None
    commit = commit or _cached_commit(model, revision or "main", environ)
    if commit is None:
        raise ConfigError(
            f"the revision of the weights of {model!r} is not known; use a local directory, give "
            'the engine a full commit as its revision, or set "weights"'
        )
    return f"commit:{commit}"


def storage_keys(identity: bytes, hashes: Iterable[bytes]) -> list[BlockKey]:
    """Keys under which blocks are stored. Deployments with different identities share no key."""
    whole = hashlib.sha256(identity)
    keys: list[BlockKey] = []
    for block_hash in hashes:
        digest = whole.copy()
        digest.update(block_hash)
        keys.append(BlockKey(digest.digest()))
    return keys


def key_path(keys: list[BlockKey], block_tokens: int) -> TokenPath:
    """Keys as the path of a prefix tree: the first eight tokens of a block are its key.

    Keys are chained, so equal keys mean equal prefixes. A path has as many tokens as the real
    blocks have, so eviction policies see the true lengths.
    """
    if block_tokens < _KEY_WORDS:
        raise ConfigError(
            f"blocks of {block_tokens} tokens are too small; use at least {_KEY_WORDS}"
        )
    tokens = np.zeros((len(keys), block_tokens), dtype=np.int32)
    if keys:
        tokens[:, :_KEY_WORDS] = np.frombuffer(b"".join(keys), dtype="<i4").reshape(-1, 8)
    return TokenPath(tokens.reshape(-1))


def _cached_commit(model: str, revision: str, environ: Mapping[str, str]) -> str | None:
    """The commit that Hugging Face's cache on this machine has for a branch or tag."""
    home = environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    note = hub / f"models--{model.replace('/', '--')}" / "refs" / revision
    try:
        commit = note.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None
