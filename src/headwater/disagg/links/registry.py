"""Links by kind: makes receivers, and senders to the addresses of peers."""

from headwater.clock import Clock, SystemClock
from headwater.disagg.links.auto import AutoReceiver, AutoSender, is_auto
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.cuda import CudaAcceptor, CudaDialer
from headwater.disagg.links.interface import (
    BlockMemory,
    Deliver,
    DeviceMemory,
    OneMemory,
    Receiver,
    Sender,
)
from headwater.disagg.links.mooncake import MooncakeAcceptor, MooncakeDialer, TransferEngine
from headwater.disagg.links.receiver import LinkAcceptor, StreamReceiver
from headwater.disagg.links.sender import Dialer, StreamSender
from headwater.disagg.links.shm import ShmAcceptor, ShmDialer
from headwater.disagg.links.tcp import TcpAcceptor, TcpDialer
from headwater.disagg.peering.tls import open_tls
from headwater.errors import ConfigError

_KNOWN = ("auto", "tcp", "shm", "cuda", "mooncake")


class Links:
    """All links of one instance. They share one block memory and one receiver of events."""

    def __init__(
        self,
        config: LinkConfig,
        memory: BlockMemory,
        deliver: Deliver,
        clock: Clock | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        """A Transfer Engine is made on first use, unless one is given."""
        self._config = config
        self._memory = memory
        self._deliver = deliver
        self._clock = clock or SystemClock()
        self._engine = engine
        self._tls = open_tls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)

    def listen(self, link: str) -> Receiver:
        """A receiver of this kind of link."""
        if link == "auto":
            return AutoReceiver(self._listen, "shm", self._deliver)
        return self._listen(link, self._deliver)

    def connect(self, address: str) -> Sender:
        """A sender to the receiver at `address`. It connects with its first push."""
        if is_auto(address):
            return AutoSender(address, self._connect, self._can_map, self._deliver)
        return self._connect(address, self._deliver)

    def _can_map(self, link: str) -> bool:
        """Whether a peer can map the blocks of this instance by this kind of link."""
        memory = self._memory
        if link == "shm":
            return isinstance(memory, OneMemory) and memory.file is not None
        return link == "cuda" and isinstance(memory, DeviceMemory) and memory.file is not None

    def _listen(self, link: str, deliver: Deliver) -> Receiver:
        return StreamReceiver(
            self._acceptor(link), self._memory, deliver, self._config, self._clock
        )

    def _connect(self, address: str, deliver: Deliver) -> Sender:
        return StreamSender(
            self._dialer(address), self._memory, deliver, self._config, self._clock
        )

    # Not a dictionary of methods: it would make a reference cycle, and the block memory would
    # stay until the next garbage collection.

    def _acceptor(self, link: str) -> LinkAcceptor:
        config, block_bytes = self._config, self._memory.block_bytes
        match link:
            case "tcp":
                return TcpAcceptor(config, block_bytes, self._tls)
            case "shm":
                return ShmAcceptor(self._memory)
            case "cuda":
                return CudaAcceptor(self._memory)
            case "mooncake":
                return MooncakeAcceptor(config, block_bytes, self._mooncake())
        raise ConfigError(f"unknown link {link!r}; known: {', '.join(_KNOWN)}")

    def _dialer(self, address: str) -> Dialer:
        match address.partition("://")[:2]:
            case ("tcp", "://"):
                return TcpDialer(address, self._config, self._tls)
            case ("shm", "://"):
                return ShmDialer(address, self._config, self._memory)
            case ("cuda", "://"):
                return CudaDialer(address, self._config, self._memory)
            case ("mooncake", "://"):
                return self._mooncake_dialer(address)
        known = ", ".join(f"{name}://…" for name in _KNOWN[1:])
        raise ConfigError(f"{address!r} is not a link address; write one of {known}")

    def _mooncake_dialer(self, address: str) -> Dialer:
        engine, memory = self._mooncake(), self._memory
        direct = isinstance(memory, OneMemory)
        if isinstance(memory, OneMemory):
            engine.register(memory.memory)
        return MooncakeDialer(address, self._config, engine, direct=direct)

    def _mooncake(self) -> TransferEngine:
        if self._engine is None:
            self._engine = TransferEngine(self._config)
        return self._engine
