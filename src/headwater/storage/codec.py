"""The header with which a stored block proves its identity and integrity.

    offset  bytes  field
         0      8  magic           "HWBLOCK\\0"
         8      4  version         uint32 LE, 1
        12      4  header bytes    uint32 LE, 160
        16      8  payload bytes   uint64 LE
        24     32  fingerprint     of the deployment: model, KV format, block size, shard
        56     32  key
        88     32  parent key
       120     16  checksum        of the payload
       136     16  seal            SHA-256, first 16 bytes, of all before it
       152      8  zero

Header and payload are two buffers, so the payload is used in place and never copied here. Both
are transferred together by scatter and gather.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwater.errors import ConfigError, StorageCorrupt, StorageError
from headwater.types import BlockKey

HEADER_BYTES = 160
KEY_BYTES = 32
FINGERPRINT_BYTES = (24, 56)
"""Offset of the fingerprint in a header, for readers that need only that."""

_MAGIC = b"HWBLOCK\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s32s16s")
_SEAL_BYTES = 16
_PAGE_BYTES = 4096
_PAGE_WORDS = _PAGE_BYTES // 8

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """What all blocks of one deployment have in common."""

    fingerprint: bytes
    """32 bytes that differ between any two deployments whose KV bytes differ."""

    block_bytes: int
    """Bytes of one block's payload."""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != KEY_BYTES:
            raise ConfigError(f"a fingerprint must have 32 bytes, got {len(self.fingerprint)}")
        if self.block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, got {self.block_bytes}")

    def check(self, buffers: Sequence[memoryview]) -> None:
        """Raise StorageError unless every buffer is the size of a block."""
        for buffer in buffers:
            if buffer.nbytes != self.block_bytes or buffer.ndim != 1 or buffer.itemsize != 1:
                raise StorageError(
                    f"a buffer of {buffer.nbytes} bytes for a block of {self.block_bytes}"
                )


class Header(NamedTuple):
    """The content of a block's header."""

    payload_bytes: int
    fingerprint: bytes
    key: BlockKey
    parent: BlockKey
    checksum: bytes


def checksum(payload: Buffer) -> bytes:
    """16 bytes that change when the payload changes by accident.

    The payload is divided into pages of 512 words of 64 bits. The sum of each page and the
    parity of each column (the xor of the same word of all pages) go into one SHA-256:

        page 0   w0   w1  …  w511  ──▶ sum 0
        page 1   w0   w1  …  w511  ──▶ sum 1      SHA-256(sums, parities, odd bytes at the end)
           ⋮      ▼    ▼       ▼
                parity of each column

    One to three flipped bits are always found; damage to a page leaves its sum as it was with
    probability 2^-64; moved, swapped or missing pages change the order of sums. The checksum is
    computed three times as fast as zlib's CRC-32, and numpy releases the interpreter lock. It
    is not a signature: a process that may write to the store can compute it too.
    """
    paged = len(payload) - len(payload) % _PAGE_BYTES
    words = np.frombuffer(payload, dtype="<u8", count=paged // 8).reshape(-1, _PAGE_WORDS)
    digest = hashlib.sha256(words.sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(np.bitwise_xor.reduce(words, axis=0).tobytes())
    digest.update(memoryview(payload)[paged:])
    return digest.digest()[:_SEAL_BYTES]


def encode_header(
    form: BlockFormat, key: BlockKey, parent: BlockKey, payload: memoryview
) -> bytes:
    """The header of one block; reads the payload once, for its checksum."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        HEADER_BYTES,
        len(payload),
        form.fingerprint,
        key,
        parent,
        checksum(payload),
    )
    return (fields + _seal(fields)).ljust(HEADER_BYTES, b"\0")


def decode_header(raw: Buffer) -> Header:
    """The content of a header. Raises StorageCorrupt if the bytes are not a header."""
    if len(raw) < HEADER_BYTES:
        raise _corrupt(
            "truncated", f"a block header needs {HEADER_BYTES} bytes, got {len(raw)}"
        )
    fields = bytes(raw[: _FIELDS.size])
    magic, version, header_bytes, payload_bytes, fingerprint, key, parent, check = (
        _FIELDS.unpack(fields)
    )
    if magic != _MAGIC:
        raise _corrupt(
            "no_header", "the bytes are not a block header: the magic number is wrong"
        )
    if version != _VERSION or header_bytes != HEADER_BYTES:
        raise _corrupt(
            "other_version", f"the block has format version {version}, expected {_VERSION}"
        )
    if bytes(raw[_FIELDS.size : _FIELDS.size + _SEAL_BYTES]) != _seal(fields):
        raise _corrupt("bad_header", "the block header is damaged")
    return Header(payload_bytes, fingerprint, BlockKey(key), BlockKey(parent), check)


def verify_block(raw: Buffer, payload: memoryview, *, form: BlockFormat, key: BlockKey) -> None:
    """Raise StorageCorrupt unless header and payload are exactly the block `key`."""
    header = decode_header(raw)
    if header.fingerprint != form.fingerprint:
        raise _corrupt("other_model", "the block belongs to another model or layout")
    if header.key != key:
        raise _corrupt(
            "other_key", f"found block {header.key.hex()[:16]}, expected {key.hex()[:16]}"
        )
    if header.payload_bytes != len(payload):
        raise _corrupt(
            "bad_length", f"the block has {header.payload_bytes} bytes, expected {len(payload)}"
        )
    if checksum(payload) != header.checksum:
        raise _corrupt("bad_checksum", f"the payload of block {key.hex()[:16]} is damaged")


def _seal(fields: bytes) -> bytes:
    return hashlib.sha256(fields).digest()[:_SEAL_BYTES]


def _corrupt(reason: str, message: str) -> StorageCorrupt:
    return StorageCorrupt(message, reason=reason)
