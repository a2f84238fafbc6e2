"""The `shm` link, for peers on one machine: the sender exports memory, the receiver copies.

Each connection brings its own memory: a sealed memfd that the sender hands over a Unix socket.
It has no name, so nothing is left behind when a process dies. The receiver maps it read-only
and checks the seals: a peer cannot pull it away under a copy.
"""

import fcntl
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence

from headwater.disagg.link import Piece, PushFailure
from headwater.disagg.links.cells import CellInbound, Cells
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import Malformed, encode_frame, make_frame
from headwater.disagg.links.hello import Greeting, Session, Welcome, greet
from headwater.disagg.links.stream import LinkBroken, Patience, Stream
from headwater.errors import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OFFER = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")
_NUM_CELLS = 2
"""One is filled while the other is emptied; more would only be colder in the caches."""


class ShmDock:
    """Listens on a Unix socket without a file: its name goes with the process."""

    link = "shm"

    def __init__(self, config: LinkConfig, block_bytes: int) -> None:
        self._least_bytes = config.cell_bytes(block_bytes)
        name = f"headwater-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{name}")
        self.listener.listen(64)
        self.address = f"shm://{name}"

    def admit(
        self, welcome: Welcome, stream: Stream, patience: Patience
    ) -> tuple[Session, "ShmInbound"]:
        raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        if user not in (os.getuid(), 0):
            raise Malformed(f"a peer of user {user}")
        session = welcome.accept()
        return session, ShmInbound(*self._take_memory(stream, patience))

    def close(self) -> None:
        """There is nothing but the listener."""

    def _take_memory(self, stream: Stream, patience: Patience) -> tuple[mmap.mmap, int]:
        """The memory that a sender hands over, mapped, and the bytes of its cells."""
        raw, files = _receive_files(stream, patience)
        try:
            if len(raw) != _OFFER.size or len(files) != 1:
                raise Malformed("no memory where it should be handed over")
            cell_bytes, num_cells = _OFFER.unpack(raw)
            if cell_bytes != self._least_bytes or num_cells != _NUM_CELLS:
                raise Malformed("memory of another shape")
            try:
                seals = fcntl.fcntl(files[0], fcntl.F_GET_SEALS)
                held_bytes = os.fstat(files[0]).st_size
                if seals & _SEALS != _SEALS or held_bytes < cell_bytes * num_cells:
                    raise Malformed("memory that could be taken away")
                memory = mmap.mmap(files[0], cell_bytes * num_cells, prot=mmap.PROT_READ)
            except OSError as error:
                raise Malformed(f"something that is no memory: {error}") from error
            return memory, cell_bytes
        finally:
            for file in files:
                os.close(file)


class ShmInbound(CellInbound):
    """Payloads in memory of the sender."""

    def __init__(self, memory: mmap.mmap, cell_bytes: int) -> None:
        super().__init__(memoryview(memory), cell_bytes)


class ShmDialer:
    """Connects to one receiver on this machine."""

    link = "shm"

    def __init__(self, address: str, config: LinkConfig) -> None:
        self._name = address.partition("://")[2]
        if not self._name:
            raise ConfigError(f"{address!r} is no address of a link")
        self._config = config
        self.frame_bytes = config.frame_bytes

    def dial(self, greeting: Greeting, patience: Patience) -> "ShmOutbound":
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(self._config.connect_timeout_s)
            connected.connect(f"\0{self._name}")
            stream = Stream(connected)
            key = greet(stream, greeting, patience).key
            cell_bytes = self._config.cell_bytes(greeting.block_bytes)
            memory = self._hand_over(stream, cell_bytes)
        except OSError as error:
            connected.close()
            raise LinkBroken(f"{self._name}: {error}", PushFailure.UNREACHABLE) from error
        except BaseException:
            connected.close()
            raise
        return ShmOutbound(stream, key, Cells(memoryview(memory), cell_bytes))

    def close(self) -> None:
        """There is nothing but connections."""

    def _hand_over(self, stream: Stream, cell_bytes: int) -> mmap.mmap:
        file = os.memfd_create("headwater-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, cell_bytes * _NUM_CELLS)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(file, cell_bytes * _NUM_CELLS)
            socket.send_fds(stream.socket, [_OFFER.pack(cell_bytes, _NUM_CELLS)], [file])
            return memory
        finally:
            os.close(file)


class ShmOutbound:
    """Payloads in memory of ours, where the receiver copies them from."""

    def __init__(self, stream: Stream, key: bytes, cells: Cells) -> None:
        self.stream = stream
        self._key = key
        self._cells = cells

    def carry(
        self,
        number: int,
        lease: int,
        pieces: Sequence[Piece],
        views: Sequence[memoryview],
        patience: Patience,
    ) -> None:
        cell = self._cells.take(number, patience)
        frame = make_frame(number, lease, cell, self._cells.gather(cell, pieces, views))
        self.stream.send([encode_frame(frame, self._key)], patience)

    def answered(self, number: int) -> None:
        self._cells.release(number)

    def close(self) -> None:
        """The memory goes when the last of the two peers lets go of it."""


def _receive_files(stream: Stream, patience: Patience) -> tuple[bytes, list[int]]:
    while True:
        try:
            raw, files, _, _ = socket.recv_fds(stream.socket, _OFFER.size, 1)
        except BlockingIOError:
            patience()
        except OSError as error:
            raise LinkBroken(f"the peer is gone: {error}") from error
        else:
            return raw, files
