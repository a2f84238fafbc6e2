"""The `mooncake` link, for many machines: Transfer Engine writes, over TCP or RDMA.

    slots ─┬─ small blocks: gather ──▶ cell ─┬═ one-sided write ═▶ cell ── copy, verify ──▶ slots
           └─ large blocks ──────────────────┘
    sender's memory                                               receiver's memory

A one-sided write cannot be fenced, so it never aims at slots: it lands in staging memory of the
receiver that is nothing else as long as the process lives, and the receiver copies. Frames and
answers take a connection of their own. Gathering makes writes large: the engine moves 2.4 GB/s
in pieces of 1 MiB and 0.13 in pieces of 4 KiB. Should a write read a slot late, when it holds
something else, then its checksum fails at the receiver.

The engine itself knows no token, and listens on every interface, whatever its host is: whoever
reaches its ports can write to this process. It belongs behind a firewall.
"""

import mmap
import struct
import sys
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import FIRST_BYTES, Frame, describe, encode_frame, make_frame
from headwater.disagg.links.staging_cells import CellInbound, StagingCells
from headwater.disagg.peering.handshake import (
    HandshakeResult,
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
    client_handshake,
)
from headwater.disagg.peering.stream import (
    Stream,
    WaitCheck,
    connect,
    host_port,
    listen,
    parse_host_port,
)
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import BlockPiece, PushFailure
from headwater.errors import ConfigError
from headwater.storage.buffers import address_of

_GRANT = struct.Struct("<QQQ")
"""Address of the first cell, bytes of a cell, number of cells; then the engine's name."""


_DIRECT_BYTES = 256 << 10
"""Blocks of this size and more are written from their slots, where those are registered."""

_POLL_S = 3e-4
"""Between two looks at a write that is under way."""


class TransferEngine:
    """One engine for all links of an instance."""

    def __init__(self, config: LinkConfig) -> None:
        self._engine = _import_engine()()
        code = self._engine.initialize(
            config.host, "P2PHANDSHAKE", config.mooncake_protocol, config.mooncake_devices
        )
        if code != 0:
            raise ConfigError(f"the Mooncake Transfer Engine does not start ({code})")
        self.name = f"{config.host}:{self._engine.get_rpc_port()}"

        self._lock = Lock()
        self._idle: dict[int, list[memoryview]] = {}
        self._all: list[memoryview] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Registered memory for staging, as long as the engine lives: never anything else.

        A late write may be on its way to it at any time.
        """
        with self._lock:
            idle = self._idle.get(num_bytes)
            if idle:
                return idle.pop()
        memory = memoryview(mmap.mmap(-1, num_bytes))
        if self._engine.register_memory(address_of(memory), num_bytes) != 0:
            raise ConfigError("Mooncake cannot register the staging memory of a link")
        with self._lock:
            self._all.append(memory)
        return memory

    def register(self, memory: memoryview) -> None:
        """Let writes read from memory of the caller's, which lives as long as the engine."""
        with self._lock:
            if any(memory is known for known in self._all):
                return
            self._all.append(memory)
        if self._engine.register_memory(address_of(memory), len(memory)) != 0:
            raise ConfigError("Mooncake cannot register the memory of the blocks")

    def free(self, memory: memoryview) -> None:
        """Memory that the next one may have for staging."""
        with self._lock:
            self._idle.setdefault(len(memory), []).append(memory)

    def start(self, name: str, source: int, target: int, num_bytes: int) -> int:
        """Begin to write to another engine's memory; a number for `poll`."""
        number: int = self._engine.batch_transfer_async_write(
            name, [source], [target], [num_bytes]
        )
        if number <= 0:
            raise LinkBroken(f"the Transfer Engine cannot write to {name} ({number})")
        return number

    def poll(self, number: int) -> bool:
        """Whether a write has ended; LinkBroken if it failed. The calls that wait would spin."""
        status: int = self._engine.transfer_check_status(number)
        if status < 0:
            raise LinkBroken(f"the Transfer Engine could not write ({status})")
        return status == 1


class MooncakeAcceptor:
    """Listens on a port, and lends each sender a part of its staging memory."""

    link = "mooncake"

    def __init__(self, config: LinkConfig, block_bytes: int, engine: TransferEngine) -> None:
        self._engine = engine
        self._cell_bytes = config.cell_bytes(block_bytes)
        self._num_cells = config.num_cells
        part_bytes = self._cell_bytes * self._num_cells
        self._memory = engine.allocate(part_bytes * config.max_senders)
        parts = range(0, len(self._memory), part_bytes)
        self._lock = Lock()
        self._free = deque(self._memory[at : at + part_bytes] for at in parts)
        """The part that was used last is lent last."""

        self.listener = listen(config.host, 0)
        self.address = f"mooncake://{host_port(config.host, self.listener)}"

    def admit(
        self, handshake: ServerHandshake, stream: Stream, check_wait: WaitCheck
    ) -> tuple[LinkSession, "MooncakeInbound"]:
        with self._lock:
            part = self._free.popleft() if self._free else None
        if part is None:
            handshake.refuse(HandshakeResult.BUSY)
        inbound = MooncakeInbound(part, self._cell_bytes, self)
        try:
            shape = _GRANT.pack(address_of(part), self._cell_bytes, self._num_cells)
            return handshake.accept(shape + self._engine.name.encode()), inbound
        except BaseException:
            inbound.close()
            raise

    def free(self, part: memoryview) -> None:
        """A sender has gone."""
        with self._lock:
            self._free.append(part)

    def close(self) -> None:
        self._engine.free(self._memory)


class MooncakeInbound(CellInbound):
    """Payloads that were written into our staging memory."""

    def __init__(self, part: memoryview, cell_bytes: int, acceptor: MooncakeAcceptor) -> None:
        super().__init__(part, cell_bytes)
        self._part = part
        self._acceptor = acceptor

    def close(self) -> None:
        self._acceptor.free(self._part)


class MooncakeDialer:
    """Connects to one receiver; its staging memory outlives connections."""

    link = "mooncake"

    def __init__(
        self, address: str, config: LinkConfig, engine: TransferEngine, *, direct: bool = False
    ) -> None:
        """`direct` where the engine has registered the slots themselves."""
        self._min_direct_bytes = _DIRECT_BYTES if direct else sys.maxsize
        self._target = parse_host_port(address)
        self._config = config
        self.frame_bytes = config.frame_bytes
        self.first_bytes = FIRST_BYTES
        self._engine = engine
        self._memory: memoryview | None = None

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> "MooncakeOutbound":
        cell_bytes = self._config.cell_bytes(terms.block_bytes)
        if self._memory is None:
            self._memory = self._engine.allocate(cell_bytes * self._config.num_cells)
        stream = connect(self._target, self._config.connect_timeout_s)
        try:
            session = client_handshake(stream, terms, check_wait)
            cells = StagingCells(self._memory, cell_bytes)
            return MooncakeOutbound(
                stream, session, self._engine, cells, self._min_direct_bytes
            )
        except BaseException:
            stream.close()
            raise

    def close(self) -> None:
        if self._memory is not None:
            self._engine.free(self._memory)


class MooncakeOutbound:
    """Payloads that a thread writes into the receiver's staging memory, then their frames.

    The thread may hang in the engine; pushes do not, since their slots have been copied.
    """

    def __init__(
        self,
        stream: Stream,
        session: LinkSession,
        engine: TransferEngine,
        cells: StagingCells,
        min_direct_bytes: int,
    ) -> None:
        """Blocks of `min_direct_bytes` or more are written from their slots."""
        if len(session.grant) <= _GRANT.size:
            raise Malformed("a receiver that lends no memory", PushFailure.REFUSED)
        self._target, their_bytes, num_cells = _GRANT.unpack_from(session.grant)
        if their_bytes != cells.cell_bytes or num_cells != cells.num_cells:
            raise LinkBroken(
                "the receiver's staging memory has another shape", PushFailure.REFUSED
            )
        self.stream = stream
        self._key = session.key
        self._name = session.grant[_GRANT.size :].decode(errors="replace")
        self._engine = engine
        self._cells = cells
        self._min_direct_bytes = min_direct_bytes
        self._queue: SimpleQueue[tuple[Frame, list[int], WaitCheck] | None] = SimpleQueue()
        self._closed = Event()
        self._thread = Thread(target=self._write, name="mooncake-write", daemon=True)
        self._thread.start()

    def send_frame(
        self,
        number: int,
        lease: int,
        pieces: Sequence[BlockPiece],
        views: Sequence[memoryview],
        check_wait: WaitCheck,
    ) -> None:
        cell = self._cells.take(number, check_wait)
        if pieces[0].num_bytes >= self._min_direct_bytes:
            sent = tuple(map(describe, pieces, views))
            sources = [address_of(view) for view in views]
        else:
            sent = self._cells.gather(cell, pieces, views)
            sources = [self._cells.address + cell * self._cells.cell_bytes]
        self._queue.put((make_frame(number, lease, cell, sent), sources, check_wait))

    def answered(self, number: int) -> None:
        self._cells.release(number)

    def withdraw(self, number: int) -> None:
        """The peer verifies whatever has been written."""

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    def _write(self) -> None:
        """Frame after frame; a failure ends the connection, and that every push of it."""
        under_way: deque[tuple[list[int], Frame, WaitCheck]] = deque()
        try:
            while not self._closed.is_set():
                while not under_way or not self._queue.empty():
                    work = self._queue.get()
                    if work is None:
                        return
                    frame, sources, check_wait = work
                    under_way.append((self._start(frame, sources), frame, check_wait))
                numbers, frame, check_wait = under_way[0]
                while numbers and self._engine.poll(numbers[0]):
                    numbers.pop(0)
                if numbers:
                    self._closed.wait(_POLL_S)
                else:
                    under_way.popleft()
                    self.stream.send([encode_frame(frame, self._key)], check_wait)
        except LinkBroken:
            self.stream.shut()

    def _start(self, frame: Frame, sources: list[int]) -> list[int]:
        """One write from each source: a block each, or all that was gathered."""
        sizes = [piece.num_bytes for piece in frame.pieces]
        if len(sources) < len(sizes):
            sizes = [frame.payload_bytes]
        target = self._target + frame.cell * self._cells.cell_bytes
        numbers = []
        for source, num_bytes in zip(sources, sizes, strict=True):
            numbers.append(self._engine.start(self._name, source, target, num_bytes))
            target += num_bytes
        return numbers


def _import_engine() -> Any:  # noqa: ANN401 -- untyped package
    try:
        from mooncake.engine import TransferEngine as Engine
    except ModuleNotFoundError as error:
        raise ConfigError("link 'mooncake' needs: pip install 'headwater[mooncake]'") from error
    except ImportError as error:
        raise ConfigError(
            f"link 'mooncake' cannot be loaded: {error}; on Debian: apt-get install libibverbs1"
        ) from error
    return Engine
