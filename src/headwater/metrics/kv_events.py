"""The format of KV events: facts about the cache as routers read them, msgpack over ZMQ.

A message is three frames: topic, sequence number (8 bytes, big-endian), payload. A payload is
`[ts, events, dp_rank]`. A block's hash is the last 8 bytes of its key, as a number.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, assert_never

import msgspec
import numpy as np

from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.types import BlockKey, Tier

Medium = Literal["GPU", "CPU", "STORAGE"]

MEDIUM: dict[Tier, Medium] = {
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
    """Empty where a salt keeps them private."""

    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: Medium


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


encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(EventBatch).decode


def pack_sequence(number: int) -> bytes:
    """A sequence number as a frame."""
    return number.to_bytes(_SEQUENCE_BYTES, "big")


def unpack_sequence(frame: bytes) -> int:
    """The number in a frame, or ValueError where that is not one."""
    if len(frame) != _SEQUENCE_BYTES:
        raise ValueError(f"a sequence number has {_SEQUENCE_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)


def block_hash(key: BlockKey) -> int:
    """What events and routers call a block: the low 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def events_of(facts: Iterable[CacheEvent], block_tokens: int) -> list[KvEvent]:
    """Facts in the words of routers."""
    return [_event(fact, block_tokens) for fact in facts]


def _event(fact: CacheEvent, block_tokens: int) -> KvEvent:
    match fact:
        case BlocksStored():
            return BlockStored(
                block_hashes=_hashes(fact.keys),
                parent_block_hash=None if fact.parent is None else block_hash(fact.parent),
                token_ids=np.frombuffer(fact.tokens, dtype="<i4").tolist(),
                block_size=block_tokens,
                lora_name=fact.adapter or None,
                medium=MEDIUM[fact.tier],
            )
        case BlocksRemoved():
            return BlockRemoved(block_hashes=_hashes(fact.keys), medium=MEDIUM[fact.tier])
        case BlocksCleared():
            return AllBlocksCleared()
        case _:
            assert_never(fact)


def _hashes(keys: Sequence[BlockKey]) -> list[int]:
    """`block_hash` of each key, in one array operation."""
    whole = np.frombuffer(b"".join(keys), dtype=">u8")
    hashes: list[int] = whole[3::4].tolist()
    return hashes
