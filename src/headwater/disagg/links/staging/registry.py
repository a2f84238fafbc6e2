"""All links of an instance whose blocks are on a device: each kind, with staging buffers."""

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.clock import Clock, SystemClock
from headwater.disagg.links.auto import AutoReceiver, AutoSender, is_auto
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.frames import MAX_PIECES
from headwater.disagg.links.interface import (
    BlockMemory,
    Deliver,
    DeviceMemory,
    HostReader,
    Receiver,
    Sender,
)
from headwater.disagg.links.mooncake import TransferEngine
from headwater.disagg.links.registry import Links
from headwater.disagg.links.shm import FRAME_BYTES
from headwater.disagg.links.staging.buffers import Buffers, OpenCopier
from headwater.disagg.links.staging.receiver import StagedReceiver
from headwater.disagg.links.staging.sender import StagedSender
from headwater.errors import ConfigError
from headwater.transfer.slab import HostSlab

_NUM_PARTS = 2
"""Parts of each sender's buffers: one is copied while another one is sent."""

_NUM_SHM_PARTS = 6
"""The same for `shm`, where a part is sent as fast as it is copied: two are copied from the
device, two are copied by the peer, and two wait for the peer's answer."""


class StagedLinks:
    """Used like `Links`, with a copier instead of block memory."""

    def __init__(  # noqa: PLR0913 -- parts of an instance, each by its name
        self,
        config: LinkConfig,
        block_bytes: int,
        open_copier: OpenCopier,
        deliver: Deliver,
        clock: Clock | None = None,
        engine: TransferEngine | None = None,
        *,
        for_ranks: bool = False,
        device: DeviceMemory | None = None,
    ) -> None:
        """A Transfer Engine is made on first use, unless one is given. Buffers `for_ranks` can be
        mapped by the other ranks of this instance. Links that map the memory of a `device` use
        no buffers."""
        self._for_ranks = for_ranks
        self._device = device
        self._config = config
        self._block_bytes = block_bytes
        self._open_copier = open_copier
        self._deliver = deliver
        self._clock = clock or SystemClock()
        self._engine = engine
        # Blocks of the largest frame of any link: a frame holds its buffers while it arrives.
        self._frame_blocks = min(max(FRAME_BYTES // block_bytes, 1), MAX_PIECES)

    def listen(self, link: str) -> Receiver:
        """A receiver of this kind, with buffers for as many senders as it serves at once."""
        if link == "auto":
            local = "shm" if self._device is None else "cuda"
            return AutoReceiver(self._listen, local, self._deliver)
        return self._listen(link, self._deliver)

    def connect(self, address: str) -> Sender:
        """A sender to the receiver at `address`, with its own buffers."""
        if is_auto(address):
            return AutoSender(address, self._connect, self._can_map, self._deliver)
        return self._connect(address, self._deliver)

    def _can_map(self, link: str) -> bool:
        """Whether a peer can map the blocks by this kind of link: always by `shm`, because its
        buffers are made when they are needed."""
        return link == "shm" or (self._device is not None and self._device.file is not None)

    def _listen(self, link: str, deliver: Deliver) -> Receiver:
        if link == "cuda" or (link == "shm" and self._reads_host()):
            return self._mapping_links(deliver).listen(link)
        num_buffers = self._config.max_senders * self._frame_blocks
        slab = HostSlab(num_buffers, self._block_bytes, for_ranks=self._for_ranks)
        buffers = Buffers(slab, self._open_copier(slab))
        with _closing_unless_made(buffers):
            return StagedReceiver(
                lambda memory, take: self._links(link, memory, take).listen(link),
                buffers,
                deliver,
                timeout_s=self._config.stall_timeout_s,
            )

    def _connect(self, address: str, deliver: Deliver) -> Sender:
        link = address.partition("://")[0]
        if link == "cuda":
            return self._mapping_links(deliver).connect(address)
        shared = link == "shm"
        slab = HostSlab(
            (_NUM_SHM_PARTS if shared else _NUM_PARTS) * self._frame_blocks,
            self._block_bytes,
            shared=shared,
            for_ranks=self._for_ranks,
        )
        buffers = Buffers(slab, self._open_copier(slab))
        # Not the slab for `mooncake`: the engine would register the slab, which is freed with
        # its sender.
        memory: BlockMemory = slab if shared else buffers
        with _closing_unless_made(buffers):
            return StagedSender(
                lambda take: self._links(link, memory, take).connect(address),
                buffers,
                deliver,
                self._clock,
                part_blocks=self._frame_blocks,
            )

    def _reads_host(self) -> bool:
        """Whether the device itself copies from the buffers of a peer on this machine."""
        device: object = self._device
        return isinstance(device, HostReader) and device.can_map_host()

    def _mapping_links(self, deliver: Deliver) -> Links:
        if self._device is None:
            raise ConfigError(
                "the cuda link needs all blocks of an instance on one GPU; with several ranks "
                "use --cache-transfer-protocol tcp or shm"
            )
        return Links(self._config, self._device, deliver, self._clock)

    def _links(self, link: str, memory: BlockMemory, deliver: Deliver) -> Links:
        if link == "mooncake" and self._engine is None:
            self._engine = TransferEngine(self._config)
        return Links(self._config, memory, deliver, self._clock, self._engine)


@contextmanager
def _closing_unless_made(buffers: Buffers) -> Iterator[None]:
    """Close the buffers if the body of the `with` statement fails, because then nothing owns
    them."""
    try:
        yield
    except BaseException:
        buffers.close()
        raise
