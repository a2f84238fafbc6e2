"""The format of KV events: changes of the cache for routers, as msgpack over ZMQ.

A message is three frames: topic, sequence number (8 bytes, big-endian), payload. A payload is
`[ts, events, dp_rank]`. A block's hash is the last 8 bytes of its key, as a number.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from mmap import mmap
from threading import Event
from time import perf_counter
from typing import Literal, assert_never

import msgspec
import numpy as np

from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.types import BlockKey, Tier

Medium = Literal["GPU", "CPU", "STORAGE"]

_MEDIUM: dict[Tier, Medium] = {
    Tier.DEVICE: "GPU",
    Tier.HOST: "CPU",
    Tier.STORAGE: "STORAGE",
}

_SEQUENCE_BYTES = 8
END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
"""The sequence number that ends a replay."""


class BlockStored(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """A run of blocks became findable."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """Empty unless token ids are published; always empty for salted blocks."""

    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: Medium
    extra_keys: list[list[str] | None] | None = None
    """For each block, what else its hash depends on: the adapter, and an id of the salt that
    does not reveal the salt. None for blocks without either."""


class BlockRemoved(msgspec.Struct, kw_only=True, frozen=True, tag_field="type"):
    """Blocks left one medium."""

    block_hashes: list[int]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type"):
    """Nothing is cached any more, in any medium."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """The cache changes of one step."""

    ts: float
    """Seconds since 1970."""

    events: list[KvEvent]
    dp_rank: int = 0


_PIECE_BLOCKS = 64
"""Blocks per event in a long batch. Encoding an event holds the interpreter lock for about 0.1
ms per thousand token ids."""

_PIECE_TOKENS = 2048
_HOLD_S = 2e-4
"""How long a long batch is encoded before other threads may run."""

_encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(EventBatch).decode


def pack_sequence(number: int) -> bytes:
    """A sequence number as a frame."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def unpack_sequence(frame: bytes) -> int:
    """The sequence number in a frame; raises ValueError when the length is wrong."""
    if len(frame) != _SEQUENCE_BYTES:
        raise ValueError(f"a sequence number has {_SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def block_hash(key: BlockKey) -> int:
    """The name of a block in events and routers: the low 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def events_of(changes: Iterable[CacheEvent], block_tokens: int) -> list[KvEvent]:
    """The changes as events."""
    return [_event(change, block_tokens) for change in changes]


def encode_batch(ts: float, changes: Sequence[CacheEvent], block_tokens: int) -> bytes:
    """The payload of `changes` at `ts` seconds since 1970."""
    return _encode(EventBatch(ts=ts, events=events_of(changes, block_tokens)))


def encode_snapshot(
    ts: float, changes: Iterable[CacheEvent], block_tokens: int, pacer: "Pacer | None" = None
) -> memoryview:
    """`encode_batch` for any number of changes: in events of bounded size, with pauses in which
    other threads get the interpreter lock. A snapshot of a million tokens would otherwise hold
    it for 0.1 s."""
    pacer = pacer or Pacer()
    pieces = [b""]
    for change in changes:
        for part in _split(change, block_tokens):
            pieces.append(_encode(_event(part, block_tokens)))
            pacer.pause()
    # An array of three: time, events, rank. The events are an array with a 32-bit length.
    pieces[0] = b"\x93" + _encode(ts) + b"\xdd" + (len(pieces) - 1).to_bytes(4, "big")
    pieces.append(_encode(0))
    # One join would copy everything without a pause; a bytearray would clear all of it first.
    whole, at = memoryview(mmap(-1, sum(map(len, pieces)))), 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += len(piece)
        pacer.pause()
    return whole.toreadonly()


class Pacer:
    """Releases the interpreter lock from time to time."""

    def __init__(self) -> None:
        self._began_s = perf_counter()
        self._never = Event()

    def pause(self) -> None:
        """Let other threads run, if this one has run for long."""
        if perf_counter() - self._began_s > _HOLD_S:
            self._yield()
            self._began_s = perf_counter()

    def _yield(self) -> None:
        # Long enough to sleep: a thread that only yields usually gets the lock back first.
        self._never.wait(1e-5)


def _split(change: CacheEvent, block_tokens: int) -> Iterator[CacheEvent]:
    """The same change, split into changes of few blocks each."""
    if not isinstance(change, BlocksStored):
        yield change
        return
    size = max(1, min(_PIECE_BLOCKS, _PIECE_TOKENS // block_tokens))
    stride = 4 * block_tokens if change.tokens else 0
    for start in range(0, len(change.keys), size):
        end = start + size
        yield replace(
            change,
            keys=change.keys[start:end],
            parent=change.keys[start - 1] if start else change.parent,
            tokens=change.tokens[start * stride : end * stride],
        )


def _event(change: CacheEvent, block_tokens: int) -> KvEvent:
    match change:
        case BlocksStored():
            return BlockStored(
                block_hashes=_hashes(change.keys),
                parent_block_hash=None if change.parent is None else block_hash(change.parent),
                token_ids=np.frombuffer(change.tokens, dtype="<i4").tolist(),
                block_size=block_tokens,
                lora_name=change.adapter or None,
                medium=_MEDIUM[change.tier],
                extra_keys=_extra_keys(change),
            )
        case BlocksRemoved():
            return BlockRemoved(block_hashes=_hashes(change.keys), medium=_MEDIUM[change.tier])
        case BlocksCleared():
            return AllBlocksCleared()
        case _:
            assert_never(change)


def _extra_keys(change: BlocksStored) -> list[list[str] | None] | None:
    identity = [part for part in (change.adapter, change.salt_id) if part]
    return [identity] * len(change.keys) if identity else None


def _hashes(keys: Sequence[BlockKey]) -> list[int]:
    """`block_hash` of each key, in one array operation."""
    whole = np.frombuffer(b"".join(keys), dtype=">u8")
    hashes: list[int] = whole[3::4].tolist()
    return hashes
