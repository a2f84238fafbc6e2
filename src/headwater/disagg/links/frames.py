"""Frames from sender to receiver, and the answers to them.

    frame    magic 4 · pieces 2 · zero 2 · number 8 · lease 8 · cell 8 · payload bytes 8 · MAC 16
    piece    index 4 · slot 4 · bytes 8 · checksum 16                      (once for each piece)
    payload  for each piece its bytes, then their checksum 16              (on the `tcp` link)

    answer   number 8 · outcome 1 · zero 7

All fields are little-endian. Frames are numbered from 0 without gaps. The MAC is a keyed hash of
the frame's other fields and its pieces. Its key comes from the handshake, so a frame of another
connection is not accepted.

Where the checksum of a block is depends on the link. On `tcp` it follows the block. With
staging memory (`mooncake`) it is in the piece. On `shm` and `cuda` there is none: no block is
transmitted, and the cell is the word in `frame_validity` instead. Checksums are those of the
storage codec.
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
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)

FIRST_BYTES = 1 << 20
"""Payload of the first frame of a push: small, so that the receiver begins early."""

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
"""Outcomes by their number on the wire; None means success."""


class SentPiece(NamedTuple):
    """One block of a frame."""

    block: int
    """Index of the block in the lease."""

    slot: int
    """Slot in the sender's memory, for a receiver that reads it there."""

    num_bytes: int
    checksum: bytes


class Frame(NamedTuple):
    """Blocks of one lease that are sent together."""

    number: int
    lease: int
    cell: int
    """Index of the staging cell, or of the word in `frame_validity`; else 0."""

    pieces: tuple[SentPiece, ...]
    payload_bytes: int
    """Bytes of all pieces."""


def announce(piece: BlockPiece) -> SentPiece:
    """The piece of a block, without a checksum."""
    return SentPiece(piece.index, piece.slot, piece.num_bytes, _NO_CHECKSUM)


def describe(piece: BlockPiece, view: memoryview) -> SentPiece:
    """The piece of a block with its checksum. Computing the checksum reads the block once."""
    return SentPiece(piece.index, piece.slot, piece.num_bytes, checksum(view))


def make_frame(number: int, lease: int, cell: int, pieces: tuple[SentPiece, ...]) -> Frame:
    """A frame of these pieces."""
    payload_bytes = sum([piece.num_bytes for piece in pieces])
    return Frame(number, lease, cell, pieces, payload_bytes)


def encode_frame(frame: Frame, key: bytes) -> bytes:
    """The bytes of a frame without its payload."""
    fields = _FRAME.pack(
        _MAGIC, len(frame.pieces), 0, frame.number, frame.lease, frame.cell, frame.payload_bytes
    )
    table = b"".join(_PIECE.pack(*piece) for piece in frame.pieces)
    return fields + _mac(fields, table, key) + table


def table_bytes(head: memoryview | bytes) -> int:
    """Number of bytes of pieces that follow a frame's first `FRAME_BYTES`."""
    magic: bytes
    num_pieces: int
    magic, num_pieces, *_ = _FRAME.unpack_from(head)
    if magic != _MAGIC or not 1 <= num_pieces <= MAX_PIECES:
        raise Malformed("frame with a wrong magic number or number of pieces")
    return num_pieces * PIECE_BYTES


def decode_frame(head: bytes, table: bytes, key: bytes, *, block_bytes: int) -> Frame:
    """The frame. Malformed if its MAC is wrong, which is checked before anything else is
    used."""
    fields = head[: _FRAME.size]
    if _mac(fields, table, key) != head[_FRAME.size :]:
        raise Malformed("frame with a wrong MAC")
    _, _, _, number, lease, cell, payload_bytes = _FRAME.unpack(fields)
    pieces = tuple(map(SentPiece._make, _PIECE.iter_unpack(table)))
    sizes = [piece.num_bytes for piece in pieces]
    if min(sizes) < 1 or max(sizes) > block_bytes:
        raise Malformed("piece that is empty or larger than a block")
    if sum(sizes) != payload_bytes:
        raise Malformed("frame whose pieces do not add up to its payload")
    return Frame(number, lease, cell, pieces, payload_bytes)


def encode_answer(number: int, failure: PushFailure | None) -> bytes:
    """The bytes of an answer."""
    return _ANSWER.pack(number, _OUTCOMES.index(failure))


def decode_answers(raw: memoryview) -> Sequence[tuple[int, PushFailure | None]]:
    """All answers in `raw`, which holds only complete ones."""
    answers = []
    for number, outcome in _ANSWER.iter_unpack(raw):
        if outcome >= len(_OUTCOMES):
            raise Malformed(f"answer with unknown outcome {outcome}")
        answers.append((number, _OUTCOMES[outcome]))
    return answers


def _mac(fields: bytes, table: bytes, key: bytes) -> bytes:
    digest = hashlib.blake2b(fields, digest_size=_MAC_BYTES, key=key)
    digest.update(table)
    return digest.digest()
