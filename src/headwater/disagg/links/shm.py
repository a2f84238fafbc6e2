"""The `shm` link, for peers on one machine: the receiver copies from the sender's block memory.

    sender's slots ── mapped by the receiver ──▶ one copy ──▶ receiver's slots

If the receiver's slots are on a GPU that can read main memory of peers, the GPU makes this
copy. After the handshake on a Unix socket, the sender passes a descriptor of its whole block
memory, a sealed memfd. It has no name, so nothing is left behind when a process dies. The seals
prevent a peer from writing to it and from shrinking it during a copy. A frame names the slots
of its blocks. The sender does not reuse them before it has the answer or has invalidated the
frame (`frame_validity`). There is no checksum: no bytes are transmitted that could be damaged.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.device_inbound import DeviceInbound
from headwater.disagg.links.frame_validity import (
    PeerFrameValidity,
)
from headwater.disagg.links.frames import Frame
from headwater.disagg.links.interface import BlockMemory, HostReader, OneMemory
from headwater.disagg.links.leases import ArrivingBlocks
from headwater.disagg.links.mapped import (
    MappedOutbound,
    check_user,
    listen_locally,
    name_of,
    offer_memory,
    offered_memory,
)
from headwater.disagg.peering.handshake import (
    HandshakeTerms,
    LinkSession,
    ServerHandshake,
)
from headwater.disagg.peering.stream import Stream, WaitCheck
from headwater.disagg.peering.tls import Tls
from headwater.disagg.protocol.errors import Malformed
from headwater.errors import ConfigError, DeviceError
from headwater.transfer.shared import map_shared

_SHARED_BYTES = 4 << 20
"""From this payload on, two threads copy a frame; each takes the next block."""

FRAME_BYTES = 32 << 20
"""Only the table of a frame is sent, so frames are large to make their cost per block small."""


class ShmAcceptor:
    """Listens on an abstract Unix socket, whose name disappears with the process."""

    link = "shm"
    tls: Tls | None = None
    """None, because bytes on a Unix socket do not leave the machine."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self.listener, name = listen_locally()
        self.address = f"shm://{name}"

    def admit(
        self, handshake: ServerHandshake, stream: Stream, check_wait: WaitCheck
    ) -> "tuple[LinkSession, ShmInbound | DeviceInbound]":
        check_user(stream)
        session = handshake.accept()
        with offered_memory(stream, check_wait) as (file, num_bytes, validity):
            memory = map_shared(file, num_bytes)
        block_bytes = self._memory.block_bytes
        if not isinstance(self._memory, HostReader):
            return session, ShmInbound(memory, validity, block_bytes)
        try:
            peer = self._memory.map_host(memory)
        except DeviceError as error:
            raise Malformed(f"the device cannot read the peer's memory: {error}") from error
        return session, DeviceInbound(peer, validity, max(FRAME_BYTES, block_bytes))

    def close(self) -> None:
        """Nothing to do: the receiver closes the listening socket."""


class ShmInbound:
    """Payloads in the slots of the sender. Copies them into slots of this instance, to which
    nothing else writes."""

    def __init__(
        self, memory: memoryview, validity: PeerFrameValidity, block_bytes: int
    ) -> None:
        self._memory = np.frombuffer(memory, dtype=np.uint8)
        self._validity = validity
        self._block_bytes = block_bytes
        self._num_slots = len(memory) // block_bytes
        self.max_bytes = max(FRAME_BYTES, block_bytes)
        self._helper = ThreadPoolExecutor(1, "shm-copy")

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        if max(piece.slot for piece in frame.pieces) >= self._num_slots:
            raise Malformed("block outside the sender's memory")
        indices, copied = iter(arriving.new), set[int]()
        if frame.payload_bytes < _SHARED_BYTES:
            self._copy(frame, arriving, indices, copied)
        else:
            helping = self._helper.submit(self._copy, frame, arriving, indices, copied)
            try:
                self._copy(frame, arriving, indices, copied)
            finally:  # also after an error: nothing is written once this returns
                if not helping.cancel():
                    helping.result()
        if self._validity.is_valid(frame):
            arriving.good.update(copied)
        return 0

    def _copy(
        self, frame: Frame, arriving: ArrivingBlocks, indices: Iterator[int], copied: set[int]
    ) -> None:
        """Copy blocks until none is left or the lease is fenced."""
        for index in indices:
            if arriving.stopped:
                return
            piece = frame.pieces[index]
            at = piece.slot * self._block_bytes
            arriving.copy(index, self._memory[at : at + piece.num_bytes])
            copied.add(index)

    def num_following(self, frame: Frame) -> int:
        return 0

    def close(self) -> None:
        self._helper.shutdown(wait=False)


class ShmDialer:
    """Connects to one receiver on this machine."""

    link = "shm"

    def __init__(self, address: str, config: LinkConfig, memory: BlockMemory) -> None:
        self._name = name_of(address)
        if not isinstance(memory, OneMemory) or memory.file is None:
            raise ConfigError(
                "the blocks of this instance are not in shared memory; start all peers with "
                "--cache-transfer-protocol shm"
            )
        self._file = memory.file
        self._num_bytes = len(memory.memory)
        self._timeout_s = config.connect_timeout_s

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> MappedOutbound:
        return offer_memory(
            self._name,
            self._timeout_s,
            terms,
            memory=(self._file, self._num_bytes),
            sizes=(FRAME_BYTES, FRAME_BYTES),
            check_wait=check_wait,
        )

    def close(self) -> None:
        """Nothing to do: only connections hold resources."""
