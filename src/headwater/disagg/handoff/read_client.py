"""Every fetch of this instance, as the one that prefills: priced, begun, landed, given up."""

from dataclasses import dataclass

from headwater.disagg.handoff.dependencies import HandoffDependencies
from headwater.disagg.protocol.actions import (
    Fence,
    FreeQuarantined,
    LocalFallback,
    OpenLease,
    Quarantine,
    Reserve,
    Send,
)
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Start
from headwater.disagg.protocol.peer_read import PeerRead, PeerReadAction, PeerReadState
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.transfer.meter import LinkMeter


@dataclass(slots=True, eq=False)
class _Work:
    machine: PeerRead
    sequence: Sequence
    peer: str


class PeerReadClient:
    """Asks D for what only D has, when that is cheaper than computing it."""

    def __init__(
        self, scheduler: Scheduler, dependencies: HandoffDependencies, config: HandoffConfig
    ) -> None:
        self._scheduler = scheduler
        self._network = dependencies.network
        self._receiver = dependencies.receiver
        self._memory = dependencies.memory
        self._config = config
        self._works: dict[int, _Work] = {}
        self._meter = LinkMeter()
        self._num_read: dict[int, int] = {}
        self.num_blocks = 0
        """Fetched since the instance started."""

    @property
    def wake_s(self) -> float | None:
        """When a fetch has something to do although nothing came."""
        end = min((w.machine.wake_s for w in self._works.values()), default=float("inf"))
        return None if end == float("inf") else end

    def begin(self, start: Start, sequence: Sequence, peer: str, now: float) -> None:
        """Begin to fetch what D has and `sequence` lacks, if that is worth it."""
        if not self._is_worth(start, sequence, now):
            return
        machine = PeerRead(
            start.handoff,
            start.num_found,
            self._config,
            block_bytes=self._memory.block_bytes,
        )
        work = _Work(machine, sequence, peer)
        self._works[start.handoff] = work
        self._scheduler.handoffs.expect(sequence)
        self._do(work, machine.begin(), now)

    def is_reading(self, handoff: int) -> bool:
        """Whether its prompt must not be computed or sent yet."""
        work = self._works.get(handoff)
        return work is not None and not work.machine.is_over

    def take_num_read(self, handoff: int) -> int:
        """How many blocks were fetched for it; forgets that."""
        return self._num_read.pop(handoff, 0)

    def told(self, handoff: int, num_blocks: int, now: float) -> None:
        """D says how many blocks it sends."""
        if (work := self._works.get(handoff)) is not None:
            self._do(work, work.machine.told(num_blocks, now), now)

    def abort(self, handoff: int, now: float) -> None:
        """The hand-off is over; its sequence is about to be ended."""
        self._num_read.pop(handoff, None)
        if (work := self._works.get(handoff)) is not None:
            self._do(work, work.machine.abort(), now)

    def link_event(self, event: BlockReceived | LeaseClosed, now: float) -> None:
        """The link says what landed, or that nothing more will."""
        work = self._works.get(event.lease)
        if work is None:
            return
        if isinstance(event, BlockReceived):
            self._do(work, work.machine.received(event.index, event.num_bytes, now), now)
        else:
            self._do(work, work.machine.closed(event.blocks), now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for work in list(self._works.values()):
            if work.machine.wake_s <= now:
                self._do(work, work.machine.tick(now), now)

    def start(self, now: float) -> None:
        """A step was scheduled: whoever got room asks D."""
        for work in list(self._works.values()):
            sequence = work.sequence
            if work.machine.state is PeerReadState.WAITING and (
                sequence.state is SequenceState.RECEIVING
            ):
                first = sequence.num_committed
                slots = sequence.block_table[first:].tolist()
                link = self._receiver.address
                self._do(work, work.machine.reserved(first, slots, link, now), now)

    def _is_worth(self, start: Start, sequence: Sequence, now: float) -> bool:
        """Whether D has enough that is not here, and sends it faster than it is computed."""
        cache = self._scheduler.cache
        longest = (sequence.num_tokens - 1) // cache.block_tokens
        here = cache.match(sequence.path(), max_blocks=longest).num_blocks
        missing = min(start.num_found, longest) - here
        if missing < self._config.pull_min_blocks or not self._scheduler.config.prefix_caching:
            return False
        rate, speed = self._meter.rate(now=now), self._scheduler.stats().rates.prefill_tokens_s
        if rate is None or not speed:
            return True  # what was never measured is tried: that is how it gets measured
        fetch_s = rate.latency_s + missing * rate.block_s
        return fetch_s < missing * cache.block_tokens / speed

    def _do(self, work: _Work, actions: list[PeerReadAction], now: float) -> None:
        handoffs, sequence = self._scheduler.handoffs, work.sequence
        handoff = work.machine.handoff
        for action in actions:
            match action:
                case Send(message):
                    self._network.send(work.peer, message)
                case Reserve():
                    handoffs.invite(sequence)
                case OpenLease(slots):
                    self._receiver.open(handoff, slots)
                case Fence():
                    self._receiver.fence(handoff)
                case LocalFallback(num_blocks):
                    self._count(work, num_blocks, now)
                    self._memory.mark_written(sequence.block_table[sequence.num_committed :])
                    handoffs.compute_here(sequence, num_blocks, now)
                case Quarantine():
                    handoffs.quarantine(sequence, handoff, now)
                case FreeQuarantined():
                    handoffs.free_quarantined(handoff)
        if work.machine.is_released:
            self._works.pop(handoff, None)

    def _count(self, work: _Work, num_blocks: int, now: float) -> None:
        if num_blocks:
            self.num_blocks += num_blocks
            self._num_read[work.machine.handoff] = num_blocks
            self._meter.observe(num_blocks, now - work.machine.asked_s, now=now)
