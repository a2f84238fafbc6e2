"""The `cuda` link, for instances with GPUs in one machine: blocks go from pool to pool.

    sender's pool ── mapped by the receiver ──▶ one copy by the receiver's device ──▶ its slots

The sender passes a descriptor of its pool's device memory over an authenticated Unix socket
(`mapped`). The driver counts users of that memory: it stays valid here if the sender dies. A
frame names the sender's slots. The receiver's device copies them into its own slots, waits for
that, and then reads the frame's validity word, as on `shm`. No byte passes through main memory,
and the sender's device does nothing.

The sender pushes only blocks of steps that it has collected. So the bytes are in device memory
before the frame is sent, and no event is shared between the processes.
"""

import logging
from collections import deque

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frame_validity import (
    PeerFrameValidity,
)
from headwater.disagg.links.frames import Frame
from headwater.disagg.links.interface import (
    BlockMemory,
    CopyInProgress,
    DeviceMemory,
    PeerBlocks,
)
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
from headwater.disagg.protocol.errors import LinkBroken, Malformed
from headwater.disagg.protocol.push import PushFailure
from headwater.errors import ConfigError, DeviceError

log = logging.getLogger(__name__)

_MAPPED, _NOT_MAPPED = b"\0", b"\1"
"""The receiver's answer to the offer."""

_FRAME_BYTES = 256 << 20
"""A fence waits for at most two frames: 20 ms at 25 GB/s, the slowest bus between two GPUs."""

_FIRST_BYTES = 64 << 20
"""Payload of the first frame of a push: small, so that the receiver begins early."""


class CudaAcceptor:
    """Listens on an abstract Unix socket, whose name disappears with the process."""

    link = "cuda"
    tls: Tls | None = None
    """None, because bytes on a Unix socket do not leave the machine."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = _device_memory(memory)
        self.listener, name = listen_locally()
        self.address = f"cuda://{name}"

    def admit(
        self, handshake: ServerHandshake, stream: Stream, check_wait: WaitCheck
    ) -> tuple[LinkSession, "CudaInbound"]:
        check_user(stream)
        session = handshake.accept()
        try:
            with offered_memory(stream, check_wait) as (file, num_bytes, validity):
                peer = self._memory.map_peer(file, num_bytes)
        except DeviceError as error:
            stream.send([_NOT_MAPPED], check_wait)
            raise Malformed(f"cannot map the peer's device memory: {error}") from error
        stream.send([_MAPPED], check_wait)
        return session, CudaInbound(peer, validity, self._memory.block_bytes)

    def close(self) -> None:
        """Releases the listening socket."""


class CudaInbound:
    """Payloads in the sender's device memory; copies them into our slots in the background."""

    def __init__(self, peer: PeerBlocks, validity: PeerFrameValidity, block_bytes: int) -> None:
        self._peer = peer
        self._validity = validity
        self.max_bytes = max(_FRAME_BYTES, block_bytes)
        self._copies: deque[CopyInProgress | None] = deque()
        """The copy of each frame that was started and not finished; None if it copies nothing."""

    def receive(self, frame: Frame, arriving: ArrivingBlocks, check_wait: WaitCheck) -> int:
        pieces = frame.pieces
        if max([piece.slot for piece in pieces]) >= self._peer.num_slots:
            raise Malformed("block outside the sender's memory")
        copy = None
        if arriving.new and not arriving.stopped:
            sources = [pieces[at].slot for at in arriving.new]
            sizes = [pieces[at].num_bytes for at in arriving.new]
            try:
                copy = self._peer.start_copy(sources, arriving.slots(pieces), sizes)
            except DeviceError:
                log.exception("cannot start a copy from a peer's device memory")
        self._copies.append(copy)
        return 0

    def finish(self, frame: Frame, arriving: ArrivingBlocks) -> None:
        copy = self._copies.popleft()
        if copy is None:
            return
        try:
            copy.wait()
        except DeviceError:
            log.exception("a copy from a peer's device memory failed")
            return
        if self._validity.is_valid(frame):
            arriving.good.update(arriving.new)

    def num_following(self, frame: Frame) -> int:
        return 0

    def close(self) -> None:
        self._peer.close()


class CudaDialer:
    """Connects to one receiver on this machine."""

    link = "cuda"

    def __init__(self, address: str, config: LinkConfig, memory: BlockMemory) -> None:
        self._name = name_of(address)
        device = _device_memory(memory)
        if device.file is None:
            raise ConfigError(
                "peers cannot map the device memory of this instance; start all peers with "
                "--cache-transfer-protocol cuda"
            )
        self._file, self._num_bytes = device.file, device.num_bytes
        self._timeout_s = config.connect_timeout_s
        self.frame_bytes, self.first_bytes = _FRAME_BYTES, _FIRST_BYTES

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> MappedOutbound:
        outbound = offer_memory(
            self._name,
            self._timeout_s,
            terms,
            memory=(self._file, self._num_bytes),
            check_wait=check_wait,
        )
        answer = bytearray(1)
        try:
            outbound.stream.fill(memoryview(answer), check_wait)
            if answer != _MAPPED:
                raise LinkBroken(
                    "the receiver's device cannot map this instance's device memory",
                    PushFailure.REFUSED,
                )
        except BaseException:
            outbound.stream.close()
            raise
        return outbound

    def close(self) -> None:
        """Nothing to do: only connections hold resources."""


def _device_memory(memory: BlockMemory) -> DeviceMemory:
    if not isinstance(memory, DeviceMemory):
        raise ConfigError(
            "the cuda link needs a GPU; on one machine without GPUs use "
            "--cache-transfer-protocol shm"
        )
    return memory
