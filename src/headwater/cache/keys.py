"""The identity of a block: its tokens and everything before it, in one namespace of one
deployment.

`TokenPath` is a sequence's identity inside the process, compared byte by byte. `KeyScheme`
turns the same identity into 32-byte keys for use outside the process: storage, events, routing.
The encoding is fixed-width, binary and versioned; two deployments that differ in anything that
changes KV bytes have no key in common.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headwater.errors import CacheUseError
from headwater.native import block_keys
from headwater.types import BlockKey, Tokens

_DOMAIN = b"headwater/block-key/1"
_DTYPE = np.dtype(np.int32)
_INT32 = np.iinfo(np.int32)


class Namespace(NamedTuple):
    """Requests with the same salt *and* the same adapter share blocks. A tuple, because tuples
    hash fast."""

    salt: str = ""
    adapter: str = ""


SHARED = Namespace()
"""The namespace of requests with neither salt nor adapter."""


class MediaSpan(NamedTuple):
    """Tokens [start, end) stand for an image, a sound or other media, identified by its
    digest."""

    start: int
    end: int
    digest: bytes


class PathKeys:
    """Block keys of the first blocks of one path, remembered for every user of the path.

    Any thread may compute and remember them, because the entry is replaced as a whole. Keys of
    another scheme, as after a reload of weights, are never returned.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: tuple[KeyScheme | None, list[BlockKey]] = (None, [])

    def known(self, scheme: "KeyScheme") -> list[BlockKey]:
        """The keys that are remembered, from the first block on. Not to be changed."""
        owner, keys = self._known
        return keys if owner is scheme else []

    def known_run(self, scheme: "KeyScheme", start: int, count: int) -> list[BlockKey] | None:
        """Keys of blocks [start, start + count); None unless all of them are remembered."""
        owner, keys = self._known
        end = start + count
        return keys[start:end] if owner is scheme and len(keys) >= end else None

    def remember(self, scheme: "KeyScheme", keys: list[BlockKey]) -> None:
        """Remember the keys of the first blocks, if these are more than are known already."""
        if len(keys) > len(self.known(scheme)):
            self._known = scheme, keys


class TokenPath:
    """The tokens of one sequence, whose full blocks are a path in the tree.

    A view: the array is neither copied nor changed, and must not change while it is used.
    """

    __slots__ = ("keys", "media", "namespace", "tokens", "view")

    def __init__(
        self,
        tokens: Tokens | Sequence[int],
        namespace: Namespace = SHARED,
        media: Mapping[int, bytes] | None = None,
        keys: PathKeys | None = None,
    ) -> None:
        """`keys` is shared by paths of one sequence: same first tokens, namespace and media."""
        array = tokens if isinstance(tokens, np.ndarray) else np.array(tokens, dtype=object)
        if array.dtype != _DTYPE or not array.flags.c_contiguous or array.ndim != 1:
            array = _as_int32(array)
        self.tokens: Tokens = array
        self.view = array.data.cast("B") if len(array) else memoryview(b"")
        self.namespace = namespace
        self.media = media or None
        """Media of each block that has any, by block index; see `media_by_block`."""
        self.keys = keys
        """Keys of its first blocks, once something computes or shares them."""

    def num_blocks(self, block_tokens: int) -> int:
        """Full blocks; a trailing partial block has no identity yet."""
        return len(self.tokens) // block_tokens


def media_by_block(spans: Iterable[MediaSpan], block_tokens: int) -> dict[int, bytes]:
    """For each block with media, by block index: bytes that distinguish it from blocks with
    equal tokens.

    A span counts in every block that it touches, with its start relative to that block: the
    same image one token later is another block.
    """
    media: dict[int, bytes] = {}
    for start, end, digest in sorted(spans):
        if not 0 <= start < end:
            raise CacheUseError(f"media span [{start}, {end}) is empty or negative")
        for block in range(start // block_tokens, (end - 1) // block_tokens + 1):
            entry = struct.pack("<qI", start - block * block_tokens, len(digest)) + digest
            media[block] = media.get(block, b"") + entry
    return media


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyScheme:
    """Everything except the tokens that determines the bytes of a block."""

    block_tokens: int
    fingerprint: bytes = b""
    """Content hash of the model's weights and config."""

    kv_format: str = ""
    """Element type and layout version of the KV bytes."""

    shard: str = ""
    """The part of the heads or layers that this process keeps."""

    def root(self, namespace: Namespace) -> BlockKey:
        """The key that the first block of a namespace is chained to."""
        fields = (
            (b"f", self.fingerprint),
            (b"k", self.kv_format.encode()),
            (b"b", struct.pack("<I", self.block_tokens)),
            (b"p", self.shard.encode()),
            (b"a", namespace.adapter.encode()),
            (b"s", namespace.salt.encode()),
        )
        # Each field has a tag and a length before it, so a salt is never confused with an
        # adapter.
        encoded = b"".join(tag + struct.pack("<I", len(value)) + value for tag, value in fields)
        return BlockKey(hashlib.sha256(_DOMAIN + encoded).digest())

    def of_path(self, path: TokenPath, num_blocks: int) -> list[BlockKey]:
        """Keys of the first `num_blocks` blocks of `path`. Remembered keys are not computed
        again.

        Any thread may call this. Keys of a long prompt take milliseconds, so the engine loop
        should not compute them.
        """
        remembered = path.keys = path.keys or PathKeys()
        known = remembered.known(self)
        start, stride = len(known), self.block_tokens * 4
        if start < num_blocks:
            last = known[-1] if known else self.root(path.namespace)
            media = path.media and {i - start: m for i, m in path.media.items() if i >= start}
            rest = path.view[start * stride : num_blocks * stride]
            known = known + self.chain(last, rest, media)
            remembered.remember(self, known)
        return known[:num_blocks]

    def chain(
        self, parent: BlockKey, tokens: bytes | memoryview, media: Mapping[int, bytes] | None
    ) -> list[BlockKey]:
        """One key for each full block of `tokens` (int32, little-endian), after `parent`.

        `media` is by block index within `tokens`.
        """
        stride = self.block_tokens * 4
        if not media:
            return cast("list[BlockKey]", block_keys.chain(parent, tokens, stride))
        keys: list[BlockKey] = []
        key: bytes = parent
        for number, at in enumerate(range(0, len(tokens) - stride + 1, stride)):
            digest = hashlib.sha256(key)
            digest.update(tokens[at : at + stride])
            if number in media:
                digest.update(media[number])
            key = digest.digest()
            keys.append(BlockKey(key))
        return keys


def _as_int32(array: NDArray[Any]) -> Tokens:
    """A contiguous int32 copy, or CacheUseError if a token does not fit."""
    if array.ndim != 1:
        raise CacheUseError(f"tokens must be one-dimensional, not of shape {array.shape}")
    if array.dtype == object:
        integers = all(isinstance(token, int) for token in array)
    else:
        integers = array.dtype.kind in "iu"
    if not integers:
        raise CacheUseError(f"tokens must be integers, not {array.dtype}")
    if len(array) and not (_INT32.min <= array.min() and array.max() <= _INT32.max):
        raise CacheUseError("a token id does not fit into 32 bits")
    return np.ascontiguousarray(array, dtype=np.int32)
