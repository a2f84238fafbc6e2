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

from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.device_inbound import DeviceInbound
from headwater.disagg.links.interface import (
    BlockMemory,
    DeviceMemory,
)
from headwater.disagg.links.mapped import (
    FrameSizes,
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

_MAPPED, _NOT_MAPPED, _MAPPED_NEAR = b"\0", b"\1", b"\2"
"""The receiver's answer to the offer. Memory is near if it is on the receiver's own device."""

_FRAME_SIZES = 64 << 20, 256 << 20
"""The first frame is small, so that the receiver begins early. A fence waits for at most two
frames: 20 ms at 25 GB/s, the slowest bus between two GPUs."""

_NEAR_SIZES = 256 << 20, 1 << 30
"""The same for memory on one device, which copies more than 500 GB/s even while it computes. To
receive the next frame takes about as long as to copy 256 MiB. A fence waits for at most four
frames."""


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
    ) -> tuple[LinkSession, DeviceInbound]:
        check_user(stream)
        session = handshake.accept()
        try:
            with offered_memory(stream, check_wait) as (file, num_bytes, validity):
                peer = self._memory.map_peer(file, num_bytes)
        except DeviceError as error:
            stream.send([_NOT_MAPPED], check_wait)
            raise Malformed(f"cannot map the peer's device memory: {error}") from error
        stream.send([_MAPPED_NEAR if peer.is_near else _MAPPED], check_wait)
        _, frame_bytes = _sizes(is_near=peer.is_near)
        largest = max(frame_bytes, self._memory.block_bytes)
        return session, DeviceInbound(peer, validity, largest)

    def close(self) -> None:
        """Nothing to do: the receiver closes the listening socket."""


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

    def dial(self, terms: HandshakeTerms, check_wait: WaitCheck) -> MappedOutbound:
        outbound = offer_memory(
            self._name,
            self._timeout_s,
            terms,
            memory=(self._file, self._num_bytes),
            sizes=_FRAME_SIZES,
            check_wait=check_wait,
        )
        answer = bytearray(1)
        try:
            outbound.stream.fill(memoryview(answer), check_wait)
            if answer not in (_MAPPED, _MAPPED_NEAR):
                raise LinkBroken(
                    "the receiver's device cannot map this instance's device memory",
                    PushFailure.REFUSED,
                )
        except BaseException:
            outbound.stream.close()
            raise
        is_near = answer == _MAPPED_NEAR
        outbound.first_bytes, outbound.frame_bytes = _sizes(is_near=is_near)
        return outbound

    def close(self) -> None:
        """Nothing to do: only connections hold resources."""


def _sizes(*, is_near: bool) -> FrameSizes:
    return _NEAR_SIZES if is_near else _FRAME_SIZES


def _device_memory(memory: BlockMemory) -> DeviceMemory:
    if not isinstance(memory, DeviceMemory):
        raise ConfigError(
            "the cuda link needs a GPU; on one machine without GPUs use "
            "--cache-transfer-protocol shm"
        )
    return memory
