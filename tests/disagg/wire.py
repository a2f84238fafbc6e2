"""For link tests: a peer that can send anything."""

from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from headwater.clock import SystemClock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.cuda import CudaDialer
from headwater.disagg.links.frames import (
    ANSWER_BYTES,
    SentPiece,
    decode_answers,
    encode_frame,
    make_frame,
)
from headwater.disagg.links.interface import BlockMemory
from headwater.disagg.links.mooncake import MooncakeDialer, TransferEngine
from headwater.disagg.links.registry import Links
from headwater.disagg.links.sender import Dialer
from headwater.disagg.links.shm import ShmDialer
from headwater.disagg.links.tcp import TcpDialer
from headwater.disagg.peering.handshake import HandshakeTerms, timeout_check
from headwater.disagg.protocol.push import BlockPiece, PushFailure
from headwater.storage.codec import checksum
from headwater.testing.links import BlockArray

CONFIG = LinkConfig(token=b"a token of tests", max_senders=8, connect_timeout_s=1.0)
NUM_SLOTS = 8
WIRE_LINKS = ("tcp", "shm", "cuda", pytest.param("mooncake", marks=pytest.mark.slow))
"""Links with a protocol of their own; `auto` uses two of them."""

LINKS = ("auto", *WIRE_LINKS)
STAGED_LINKS = ("auto", "tcp", "shm", pytest.param("mooncake", marks=pytest.mark.slow))
"""Links that pass through staging buffers if blocks are on a device."""


@cache
def engine(end: str) -> TransferEngine:
    """One Transfer Engine for each end, for all tests: ending one takes a second."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    return TransferEngine(CONFIG)


class MakeLinks:
    """Links of instances in this process: the first receives, all others send."""

    def __init__(self, link: str) -> None:
        self._link = link
        self._end = "receiver"

    def __call__(self, memory, deliver) -> Links:
        end, self._end = self._end, "sender"
        given = engine(end) if self._link == "mooncake" else None
        return Links(CONFIG, memory, deliver, engine=given)


def dialer(
    address: str, config: LinkConfig = CONFIG, memory: BlockMemory | None = None
) -> Dialer:
    """The dialer for an address."""
    link = address.partition("://")[0]
    if link == "mooncake":
        return MooncakeDialer(address, config, engine("sender"))
    if link == "shm":
        return ShmDialer(address, config, memory or BlockArray(1, 4096))
    if link == "cuda":
        return CudaDialer(address, config, memory or BlockArray(1, 4096))
    return TcpDialer(address, config)


class RawSender:
    """A peer that is authenticated and then sends what a test wants."""

    def __init__(self, address: str, block_bytes: int) -> None:
        self._link = address.partition("://")[0]
        self._wait_check = timeout_check(SystemClock(), 10.0)
        terms = HandshakeTerms(self._link, CONFIG.token, block_bytes)
        self.memory = BlockArray(NUM_SLOTS, block_bytes)
        """The memory of this peer, which a receiver of a link that maps memory copies from."""

        self.outbound = dialer(address, memory=self.memory).dial(terms, self._wait_check)
        self.stream = self.outbound.stream
        self.key: bytes = self.outbound._key  # type: ignore[attr-defined] # for forged frames

    def frame(
        self,
        number: int,
        lease: int,
        blocks: dict[int, bytes],
        *,
        cell: int = 0,
        flip: int = -1,
    ) -> bytes:
        """A frame in its wire format; `flip` is a bit of the payload that is flipped. In shared
        memory its blocks are in the slots from `cell` on, and marked valid."""
        pieces = tuple(
            SentPiece(at, slot, len(block), checksum(block))
            for slot, (at, block) in enumerate(blocks.items(), cell)
        )
        payload = bytearray(b"".join(blocks.values()))
        if flip >= 0:
            payload[flip // 8] ^= 1 << flip % 8
        head = encode_frame(make_frame(number, lease, cell, pieces), self.key)
        if self._link in ("shm", "cuda"):
            self.outbound._validity._words[cell] = number + 1  # type: ignore[attr-defined]
        if self._link == "tcp":
            return head + b"".join(_with_checksums(payload, list(blocks.values())))
        self.stage(cell, payload)
        return head

    def stage(self, cell: int, payload: bytes | bytearray) -> None:
        """Write bytes where the receiver copies them from, as a late write would."""
        if self._link in ("shm", "cuda"):
            at = cell * self.memory.block_bytes
            self.memory.memory[at : at + len(payload)] = payload
            return
        cells = self.outbound._cells  # type: ignore[attr-defined] # no peer of ours does this
        if cell * cells.cell_bytes + len(payload) > len(cells._memory):
            return
        cells.gather(cell, [BlockPiece(0, 0, len(payload))], [memoryview(payload)])
        if self._link == "mooncake":
            out = self.outbound
            at = cell * cells.cell_bytes
            source, target = cells.address + at, out._target + at  # type: ignore[attr-defined]
            number = out._engine.start(out._name, source, target, len(payload))  # type: ignore[attr-defined]
            while not out._engine.poll(number):  # type: ignore[attr-defined]
                self._wait_check()

    def send(self, raw: bytes) -> None:
        self.stream.send([raw], self._wait_check)

    def answer(self) -> tuple[int, PushFailure | None]:
        """The next answer; LinkBroken if the connection is dropped."""
        raw = memoryview(bytearray(ANSWER_BYTES))
        self.stream.fill(raw, self._wait_check)
        return decode_answers(raw)[0]

    def close(self) -> None:
        self.outbound.close()
        self.stream.close()


def _with_checksums(payload: bytearray, blocks: list[bytes]) -> Iterator[bytes]:
    """Blocks as they are in the payload, each followed by the checksum it should have."""
    at = 0
    for block in blocks:
        yield bytes(payload[at : at + len(block)]) + checksum(block)
        at += len(block)


def pieces_of(indices: Sequence[int], block_bytes: int) -> tuple[BlockPiece, ...]:
    """Block `i` of the source as block `i` of the lease."""
    return tuple(BlockPiece(index, index, block_bytes) for index in indices)
