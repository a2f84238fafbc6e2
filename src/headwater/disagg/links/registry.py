"""Links by kind: what an instance listens on, and what it makes of a peer's address."""

from collections.abc import Callable

from headwater.clock import Clock, SystemClock
from headwater.disagg.link import BlockMemory, Deliver, OneMemory, Receiver, Sender
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.mooncake import MooncakeDialer, MooncakeDock, TransferEngine
from headwater.disagg.links.receiver import Dock, StreamReceiver
from headwater.disagg.links.sender import Dialer, StreamSender
from headwater.disagg.links.shm import ShmDialer, ShmDock
from headwater.disagg.links.tcp import TcpDialer, TcpDock
from headwater.errors import ConfigError


class Links:
    """All links of one instance: one memory, one place for their events."""

    def __init__(
        self,
        config: LinkConfig,
        memory: BlockMemory,
        deliver: Deliver,
        clock: Clock | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        """A Transfer Engine is made when one is needed, unless one is given."""
        self._config = config
        self._memory = memory
        self._deliver = deliver
        self._clock = clock or SystemClock()
        self._engine = engine
        self._docks: dict[str, Callable[[], Dock]] = {
            "tcp": lambda: TcpDock(config, memory.block_bytes),
            "shm": lambda: ShmDock(memory.block_bytes),
            "mooncake": lambda: MooncakeDock(config, memory.block_bytes, self._mooncake()),
        }
        self._dialers: dict[str, Callable[[str], Dialer]] = {
            "tcp": lambda address: TcpDialer(address, config),
            "shm": lambda address: ShmDialer(address, config, memory),
            "mooncake": self._mooncake_dialer,
        }

    def listen(self, link: str) -> Receiver:
        """A receiver of this kind, reachable at its `address`."""
        dock = self._docks.get(link)
        if dock is None:
            raise ConfigError(f"unknown link {link!r}; known: {', '.join(self._docks)}")
        return StreamReceiver(dock(), self._memory, self._deliver, self._config, self._clock)

    def connect(self, address: str) -> Sender:
        """A sender to the receiver at `address`; connects when there is something to push."""
        link, found, _ = address.partition("://")
        dialer = self._dialers.get(link)
        if not found or dialer is None:
            known = ", ".join(f"{name}://…" for name in self._dialers)
            raise ConfigError(f"{address!r} is no address of a link; known: {known}")
        return StreamSender(
            dialer(address), self._memory, self._deliver, self._config, self._clock
        )

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
