"""Engines with hand-offs in one process: real loops, schedulers and caches, with a fabric that
the test controls.

The KV of an `EchoRunner` is the tokens themselves, so a block that is sent, received or reused
wrongly gives other tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import VirtualClock
from headwater.disagg.handoff.controller import HandoffController
from headwater.disagg.handoff.resources import HandoffDependencies
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Message
from headwater.disagg.protocol.push import Push, PushFailure
from headwater.engine.core import EngineCore
from headwater.scheduler.request import Request
from headwater.storage.base import StorageBackend
from headwater.testing.copiers import EchoCopier, HeldWorkers
from headwater.testing.fabric import HeldFabric, Post
from headwater.testing.runners import EchoRunner
from headwater.testing.tiers import VOCAB_SIZE, RecordedOutputs, make_eager_scheduler
from headwater.transfer.mover import Mover
from headwater.transfer.slab import HostSlab
from headwater.types import Slots, WritePolicy


class HeldNetwork:
    """The `Network` of one host of a fabric."""

    def __init__(self, fabric: HeldFabric, name: str) -> None:
        self._fabric = fabric
        self._name = name

    def send(self, peer: str, message: Message) -> int:
        return self._fabric.send(self._name, peer, message)

    def close(self) -> None:
        return None


class HeldSender:
    """The `Sender` of one host to one receiver."""

    def __init__(self, fabric: HeldFabric, name: str, link: str) -> None:
        self._fabric = fabric
        self._name = name
        self._link = link
        self._is_closed = False

    def push(self, push: Push) -> None:
        if self._is_closed:
            self._fabric.refuse(self._name, push, PushFailure.CLOSED)
        else:
            self._fabric.push(self._name, self._link, push)

    def extend(self, lease: int, deadline_s: float) -> None:
        self._fabric.extend(self._name, self._link, lease, deadline_s)

    def cancel(self, lease: int) -> None:
        self._fabric.cancel(self._name, self._link, lease)

    def close(self) -> None:
        self._is_closed = True
        self._fabric.close_sender(self._name, self._link)


class HeldReceiver:
    """The `Receiver` of one host."""

    def __init__(self, fabric: HeldFabric, link: str) -> None:
        self._fabric = fabric
        self.address = link

    def open(self, lease: int, slots: Sequence[int]) -> None:
        self._fabric.open_lease(self.address, lease, slots)

    def fence(self, lease: int) -> None:
        self._fabric.fence(self.address, lease)

    def close(self) -> None:
        self._fabric.close_receiver(self.address)


@dataclass(frozen=True, slots=True)
class EchoMemory:
    """The blocks of an echo engine. `mark_written` has nothing to update."""

    block_bytes: int

    def mark_written(self, slots: Slots) -> None:
        return None


@dataclass(kw_only=True)
class EchoPeer(RecordedOutputs):
    """One instance, and its outputs so far."""

    fabric: HeldFabric
    clock: VirtualClock
    name: str
    epoch: int = 0
    num_blocks: int = 64
    host_blocks: int = 0
    storage: StorageBackend | None = None
    """Storage below the host tier; peers may share it."""

    block_tokens: int = 4
    depth: int = 1
    config: HandoffConfig = field(default_factory=HandoffConfig)
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cache = CacheConfig(
            device_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            host_blocks=self.host_blocks,
            storage=self.storage is not None,
            write_policy=WritePolicy.WRITE_THROUGH,
        )
        self.cache = TieredCache(cache)
        self.scheduler = make_eager_scheduler(self.cache, self.settings)
        self.runner = EchoRunner(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            depth=self.depth,
            vocab_size=VOCAB_SIZE,
        )
        self.rows = self.runner.rows
        slab = HostSlab(self.host_blocks, self.rows.shape[1])
        backend = self.storage
        workers = None if backend is None else HeldWorkers(backend, slab, self.clock)
        mover = Mover(EchoCopier(self.runner, slab), workers)
        self.core = EngineCore(self.scheduler, self.runner, self.clock, mover)
        self.link = f"held://{self.name}/{self.epoch}"
        self.fabric.enter(self, self.link)
        self.handoffs = self._make_handoffs()
        self.core.join(self.handoffs)

    @property
    def post(self) -> Post:
        return self.core.completions.post

    def held_slots(self) -> Slots:
        return self.cache.held_slots()

    def step(self) -> None:
        """Run one turn of the loop if there is work, and record the outputs."""
        if not self.core.has_work:
            return
        for output in self.core.step():
            self.note(output)

    def add(self, request: Request) -> None:
        """Add a request, as the loop does."""
        self.core.add(request)

    def check_idle(self) -> None:
        """Check that every invariant holds and nothing is held, leased or in flight."""
        self.core.check()
        stats = self.cache.stats()
        assert stats.leases == 0, f"kept: {stats}"
        assert stats.device.free + stats.device.cached == stats.device.total, f"leaked: {stats}"

    def _make_handoffs(self) -> HandoffController:
        dependencies = HandoffDependencies(
            network=HeldNetwork(self.fabric, self.name),
            receiver=HeldReceiver(self.fabric, self.link),
            connect=lambda link: HeldSender(self.fabric, self.name, link),
            memory=EchoMemory(self.rows.shape[1]),
            new_id=_numbers(f"{self.name}/{self.epoch}"),
        )
        return HandoffController(self.scheduler, dependencies, self.config)


class EchoPair:
    """A prefill and a decode instance; `run` lets everything arrive in order."""

    def __init__(self, **settings: object) -> None:
        self.clock = VirtualClock()
        self.fabric = HeldFabric()
        self._settings = settings
        self._epochs = 0
        self.prefill = self.make("p")
        self.decode = self.make("d")

    @property
    def peers(self) -> tuple[EchoPeer, EchoPeer]:
        return self.prefill, self.decode

    def make(self, name: str) -> EchoPeer:
        """A fresh instance of that name."""
        self._epochs += 1
        own = {key.removeprefix(f"{name}_"): value for key, value in self._settings.items()}
        known = EchoPeer.__dataclass_fields__
        return EchoPeer(
            fabric=self.fabric,
            clock=self.clock,
            name=name,
            epoch=self._epochs,
            **{key: value for key, value in own.items() if key in known},  # type: ignore[arg-type]
        )

    def turn(self, *, blocks: bool = True, fences: bool = True) -> None:
        """Let the chosen messages and bytes arrive, then run one turn of both loops."""
        fabric = self.fabric
        for packet in list(fabric.packets):
            if packet in fabric.packets:
                fabric.deliver(packet)
        for transfer in list(fabric.transfers) if blocks else ():
            while transfer in fabric.transfers:
                fabric.move(transfer)
        for entry in list(fabric.fences) if fences else ():
            fabric.settle_fence(entry)
        for peer in self.peers:
            peer.step()

    def run(self, *names: str, within_s: float = 60.0, step_s: float = 0.01) -> None:
        """Run until these requests have ended on D. Raises AssertionError if one does not
        end."""
        end_s = self.clock.now() + within_s
        while any(name not in self.decode.reasons for name in names):
            assert self.clock.now() < end_s, "a request is stuck"
            self.turn()
            self.clock.advance(step_s)

    def drain(self, within_s: float = 60.0, step_s: float = 0.5) -> None:
        """Run until nothing is in flight and no instance has work."""
        end_s = self.clock.now() + within_s
        while self.clock.now() < end_s:
            self.turn()
            self.fabric.expire(self.clock.now())
            self.clock.advance(step_s)


def _numbers(seed: str) -> Callable[[], int]:
    random = Random(seed)
    return lambda: random.getrandbits(63)
