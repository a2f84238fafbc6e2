"""The `mooncake` link, for many machines: writes of the Transfer Engine, over TCP or RDMA.

    slots ─┬─ small blocks: gather ──▶ cell ─┬═ one-sided write ═▶ cell ── copy, verify ──▶ slots
           └─ large blocks ──────────────────┘
    sender's memory                                               receiver's memory

A one-sided write cannot be fenced. So it never targets slots: it goes to staging memory of the
receiver that has no other use while the process lives, and the receiver copies from there.
Frames and answers use a connection of their own. Small blocks are gathered because the engine
moves 2.4 GB/s in pieces of 1 MiB and 0.13 GB/s in pieces of 4 KiB. A write that reads a slot
after it was reused fails its checksum at the receiver.

The engine does not authenticate and listens on every interface, whatever host it is given: a
process that reaches its ports can write to this process. Put the ports behind a firewall.
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
from headwater.disagg.links.tcp import link_address
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
    listen,
    parse_host_port,
)
from headwater.disagg.peering.tls import Tls
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import BlockPiece, PushFailure
from headwater.errors import ConfigError
from headwater.storage.calls import address_of

_GRANT = struct.Struct("<QQQ")
"""Address of the first cell, size of a cell, number of cells; the engine's name follows."""


_DIRECT_BYTES = 256 << 10
"""Blocks of this size and larger are written from their slots, where those are registered."""

_POLL_S = 3e-4
"""Time between two checks of a write in progress."""


class TransferEngine:
    """One Transfer Engine for all links of an instance."""

    def __init__(self, config: LinkConfig) -> None:
        self._engine = _import_engine()()
        code = self._engine.initialize(
            config.reachable_host,
            "P2PHANDSHAKE",
            config.mooncake_protocol,
            config.mooncake_devices,
        )
        if code != 0:
            raise ConfigError(
                f"the Mooncake Transfer Engine did not start (code {code}); its log lines above say why"
            )
        self.name = f"{config.reachable_host}:{self._engine.get_rpc_port()}"

        self._lock = Lock()
        self._idle: dict[int, list[memoryview]] = {}
        self._all: list[memoryview] = []

    def allocate(self, num_bytes: int) -> memoryview:
        """Registered staging memory. While the engine lives, the memory is used for staging
        only, because a late write may arrive in it at any time.
        """
        with self._lock:
            idle = self._idle.get(num_bytes)
            if idle:
                return idle.pop()
        memory = memoryview(mmap.mmap(-1, num_bytes))
        if self._engine.register_memory(address_of(memory), num_bytes) != 0:
            raise ConfigError(
                "the Mooncake Transfer Engine cannot register staging memory; check ulimit -l and the RDMA devices"
            )
        with self._lock:
            self._all.append(memory)
        return memory

    def register(self, memory: memoryview) -> None:
        """Let writes read from the caller's memory, which must outlive the engine."""
        with self._lock:
            if any(memory is known for known in self._all):
                return
            self._all.append(memory)
        if self._engine.register_memory(address_of(memory), len(memory)) != 0:
            raise ConfigError(
                "the Mooncake Transfer Engine cannot register the block memory; check ulimit -l and the RDMA devices"
            )

    def free(self, memory: memoryview) -> None:
        """Return staging memory for the next caller of `allocate`."""
        with self._lock:
            self._idle.setdefault(len(memory), []).append(memory)

    def start(self, name: str, source: int, target: int, num_bytes: int) -> int:
        """Begin to write to another engine's memory; returns a number for `poll`."""
        number: int = self._engine.batch_transfer_async_write(
            name, [source], [target], [num_bytes]
        )
        if number <= 0:
            raise LinkBroken(f"the Transfer Engine cannot write to {name}: code {number}")
        return number

    def poll(self, number: int) -> bool:
        """Whether a write has ended; LinkBroken if it failed. The engine's own waiting calls
        spin."""
        status: int = self._engine.transfer_check_status(number)
        if status < 0:
            raise LinkBroken(f"a write of the Transfer Engine failed: code {status}")
        return status == 1


class MooncakeAcceptor:
    """Listens on a port, and gives each sender a part of its staging memory."""

    link = "mooncake"
    tls: Tls | None = None
    """The engine does not encrypt blocks, so their frames are not encrypted either."""

    def __init__(self, config: LinkConfig, block_bytes: int, engine: TransferEngine) -> None:
        self._engine = engine
        self._cell_bytes = config.cell_bytes(block_bytes)
        self._num_cells = config.num_cells
        part_bytes = self._cell_bytes * self._num_cells
        self._memory = engine.allocate(part_bytes * config.max_senders)
        parts = range(0, len(self._memory), part_bytes)
        self._lock = Lock()
        self._free = deque(self._memory[at : at + part_bytes] for at in parts)
        """Free parts. The part that was used last is given out last."""

        self.listener = listen(config.host, config.port)
        self.address = f"mooncake://{link_address(config, self.listener)}"

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
        """Take back the staging memory of a sender that has disconnected."""
        with self._lock:
            self._free.append(part)

    def close(self) -> None:
        self._engine.free(self._memory)


class MooncakeInbound(CellInbound):
    """Payloads in this receiver's staging memory."""

    def __init__(self, part: memoryview, cell_bytes: int, acceptor: MooncakeAcceptor) -> None:
        super().__init__(part, cell_bytes)
        self._part = part
        self._acceptor = acceptor

    def close(self) -> None:
        self._acceptor.free(self._part)


class MooncakeDialer:
    """Connects to one receiver. Its staging memory outlives connections."""

    link = "mooncake"

    def __init__(
        self, address: str, config: LinkConfig, engine: TransferEngine, *, direct: bool = False
    ) -> None:
        """With `direct`, the engine has registered the slots themselves."""
        self._min_direct_bytes = _DIRECT_BYTES if direct else sys.maxsize
        self._target = parse_host_port(address)
        self._config = config
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
    """A thread writes payloads into the receiver's staging memory, then sends their frames.

    The thread may hang in the engine. Pushes do not: small blocks were copied before, and the
    receiver checks the checksums of large ones.
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
            raise Malformed("the receiver granted no staging memory", PushFailure.REFUSED)
        self._target, their_bytes, num_cells = _GRANT.unpack_from(session.grant)
        if their_bytes != cells.cell_bytes or num_cells != cells.num_cells:
            raise LinkBroken(
                "the receiver has another frame_bytes or num_cells", PushFailure.REFUSED
            )
        self.stream = stream
        self.frame_bytes, self.first_bytes = cells.cell_bytes, FIRST_BYTES
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
        """Nothing to do: the receiver verifies checksums."""

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    def _write(self) -> None:
        """Write frame after frame. A failure ends the connection, and with it every push on it."""
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
        """Begin one write for each source: a block, or a cell of gathered blocks."""
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
