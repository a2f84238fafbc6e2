"""What travels on a connection once the peers know each other: frames one way, answers back.

    frame    magic 4 · pieces 2 · zero 2 · number 8 · lease 8 · cell 8 · payload bytes 8 · seal 16
    piece    index 4 · slot 4 · bytes 8 · checksum 16                      (once for each piece)
    payload  of each piece, one after the other, its bytes and their checksum 16

In its table a piece has a checksum only where the payload is in staging memory. Where the peers
share memory there is neither payload nor checksum, and the cell is the word that pledges them.

    answer   number 8 · outcome 1 · zero 7

All little-endian. Frames are numbered from 0 on, without a gap. The seal is a keyed hash of the
frame's other fields and its pieces; the key is made by the greeting, so a frame of another
connection is no frame of this one. A block's checksum is that of the storage codec.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from headwater.disagg.protocol.errors import Malformed
from headwater.disagg.protocol.push import BlockPiece, PushFailure
from headwater.storage.codec import checksum

MAX_PIECES = 256
FRAME_BYTES = 56
PIECE_BYTES = 32
ANSWER_BYTES = 16

CHECKSUM_BYTES = 16

FIRST_BYTES = 1 << 20
"""Of a push whose payload travels, in its first frame: so the peer begins early."""

_MAGIC = b"HWF1"
_FRAME = struct.Struct("<4sHHQQQQ")
_PIECE = struct.Struct("<IIQ16s")
_ANSWER = struct.Struct("<QB7x")
_MAC_BYTES = 16

_OUTCOMES: tuple[PushFailure | None, ...] = (
    None,
    PushFailure.FENCED,
    PushFailure.OUTSIDE,
    PushFailure.TWICE,
    PushFailure.DAMAGED,
)
"""By their number on the wire; none is good news."""


class SentPiece(NamedTuple):
    """One block of a frame."""

    block: int
    """Which block of the lease."""

    slot: int
    """Where in the sender's memory it is, for a receiver that reads it there."""

    num_bytes: int
    checksum: bytes


class Frame(NamedTuple):
    """Blocks of one lease that travel together."""

    number: int
    lease: int
    cell: int
    """Where in the staging memory the payload is, or which word pledges it; else 0."""

    pieces: tuple[SentPiece, ...]
    payload_bytes: int
    """Of all pieces together."""


def announce(piece: BlockPiece) -> SentPiece:
    """What a frame says of a block that it has no checksum of."""
    return SentPiece(piece.index, piece.slot, piece.num_bytes, bytes(CHECKSUM_BYTES))


def describe(piece: BlockPiece, view: memoryview) -> SentPiece:
    """What a frame says of a block; reads it once, for its checksum."""
    return SentPiece(piece.index, piece.slot, piece.num_bytes, checksum(view))


def make_frame(number: int, lease: int, cell: int, pieces: tuple[SentPiece, ...]) -> Frame:
    """A frame of these pieces."""
    payload_bytes = sum([piece.num_bytes for piece in pieces])
    return Frame(number, lease, cell, pieces, payload_bytes)


def encode_frame(frame: Frame, key: bytes) -> bytes:
    """Everything of a frame but its payload."""
    fields = _FRAME.pack(
        _MAGIC, len(frame.pieces), 0, frame.number, frame.lease, frame.cell, frame.payload_bytes
    )
    table = b"".join(_PIECE.pack(*piece) for piece in frame.pieces)
    return fields + _mac(fields, table, key) + table


def table_bytes(head: memoryview | bytes) -> int:
    """How many bytes of pieces follow a frame's first `FRAME_BYTES`."""
    magic: bytes
    num_pieces: int
    magic, num_pieces, *_ = _FRAME.unpack_from(head)
    if magic != _MAGIC or not 1 <= num_pieces <= MAX_PIECES:
        raise Malformed("bytes that begin no frame")
    return num_pieces * PIECE_BYTES


def decode_frame(head: bytes, table: bytes, key: bytes, *, block_bytes: int) -> Frame:
    """The frame, or Malformed; nothing of it is believed before its seal is."""
    fields = head[: _FRAME.size]
    if _mac(fields, table, key) != head[_FRAME.size :]:
        raise Malformed("a frame whose seal is not ours")
    _, _, _, number, lease, cell, payload_bytes = _FRAME.unpack(fields)
    pieces = tuple(map(SentPiece._make, _PIECE.iter_unpack(table)))
    sizes = [piece.num_bytes for piece in pieces]
    if min(sizes) < 1 or max(sizes) > block_bytes:
        raise Malformed("a piece that is empty or larger than a block")
    if sum(sizes) != payload_bytes:
        raise Malformed("a frame whose pieces do not add up")
    return Frame(number, lease, cell, pieces, payload_bytes)


def encode_answer(number: int, failure: PushFailure | None) -> bytes:
    """What became of a frame."""
    return _ANSWER.pack(number, _OUTCOMES.index(failure))


def decode_answers(raw: memoryview) -> Sequence[tuple[int, PushFailure | None]]:
    """Every answer in `raw`, which holds only whole ones."""
    answers = []
    for number, outcome in _ANSWER.iter_unpack(raw):
        if outcome >= len(_OUTCOMES):
            raise Malformed("an answer that means nothing")
        answers.append((number, _OUTCOMES[outcome]))
    return answers


def _mac(fields: bytes, table: bytes, key: bytes) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=_MAC_BYTES, key=key)
    digest.update(table)
    return digest.digest()
