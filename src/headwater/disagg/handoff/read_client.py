"""Peer reads of a prefill instance: blocks of a prompt that only the decode instance has."""

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
from headwater.disagg.protocol.peer_read import PeerRead, PeerReadAction
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import Sequence
from headwater.transfer.meter import LinkMeter
from headwater.types import RequestId


@dataclass(slots=True, eq=False)
class _Entry:
    machine: PeerRead
    sequence: Sequence
    peer: str


class PeerReadClient:
    """Reads blocks from the decode instance where that is faster than computing them."""

    def __init__(
        self, scheduler: Scheduler, dependencies: HandoffDependencies, config: HandoffConfig
    ) -> None:
        self._scheduler = scheduler
        self._network = dependencies.network
        self._receiver = dependencies.receiver
        self._memory = dependencies.memory
        self._config = config
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[RequestId, _Entry] = {}
        self._meter = LinkMeter()
        self._num_read: dict[int, int] = {}

    @property
    def wake_s(self) -> float | None:
        """The next deadline of a peer read; None where there is none."""
        end = min((w.machine.wake_s for w in self._entries.values()), default=float("inf"))
        return None if end == float("inf") else end

    def begin(self, start: Start, sequence: Sequence, peer: str, now: float) -> None:
        """Read the blocks that D has and `sequence` lacks, if that is faster than computing
        them."""
        if not self._is_worth(start, sequence, now):
            return
        machine = PeerRead(
            start.handoff,
            start.num_found,
            self._config,
            block_bytes=self._memory.block_bytes,
        )
        entry = _Entry(machine, sequence, peer)
        self._entries[start.handoff] = self._by_request[sequence.request_id] = entry
        self._scheduler.handoffs.expect(sequence)
        self._do(entry, machine.begin(), now)

    def take_num_read(self, handoff: int) -> int:
        """Number of blocks read for a hand-off. The number is forgotten afterwards."""
        return self._num_read.pop(handoff, 0)

    def announced(self, handoff: int, num_blocks: int, now: float) -> None:
        """D says how many blocks it sends."""
        if (entry := self._entries.get(handoff)) is not None:
            self._do(entry, entry.machine.announced(num_blocks, now), now)

    def abort(self, handoff: int, now: float) -> None:
        """The hand-off is over, and its sequence is about to be aborted."""
        self._num_read.pop(handoff, None)
        if (entry := self._entries.get(handoff)) is not None:
            self._do(entry, entry.machine.abort(), now)

    def link_event(self, event: BlockReceived | LeaseClosed, now: float) -> None:
        """A block was received, or the lease of a peer read is closed."""
        entry = self._entries.get(event.lease)
        if entry is None:
            return
        if isinstance(event, BlockReceived):
            self._do(
                entry, entry.machine.block_received(event.index, event.num_bytes, now), now
            )
        else:
            self._do(entry, entry.machine.lease_closed(event.blocks), now)

    def tick(self, now: float) -> None:
        """Process deadlines that have passed."""
        for entry in list(self._entries.values()):
            if entry.machine.wake_s <= now:
                self._do(entry, entry.machine.tick(now), now)

    def reserved(self, sequence: Sequence, now: float) -> None:
        """The scheduler gave `sequence` its slots: ask D for the blocks that are missing."""
        entry = self._by_request.get(sequence.request_id)
        if entry is not None:
            first = sequence.num_committed
            slots = sequence.block_table[first:].tolist()
            link = self._receiver.address
            self._do(entry, entry.machine.reserved(first, slots, link, now), now)

    def _is_worth(self, start: Start, sequence: Sequence, now: float) -> bool:
        """Whether D has enough blocks that are missing here, and sends them faster than they
        are computed."""
        cache = self._scheduler.cache
        longest = (sequence.num_tokens - 1) // cache.block_tokens
        here = cache.match(sequence.path(), max_blocks=longest).num_blocks
        missing = min(start.num_found, longest) - here
        if missing < self._config.pull_min_blocks or not self._scheduler.config.prefix_caching:
            return False
        rate, speed = self._meter.rate(now=now), self._scheduler.stats().rates.prefill_tokens_s
        if rate is None or not speed:
            return True  # no measurement yet: read once, to get one
        fetch_s = rate.latency_s + missing * rate.block_s
        return fetch_s < missing * cache.block_tokens / speed

    def _do(self, entry: _Entry, actions: list[PeerReadAction], now: float) -> None:
        handoffs, sequence = self._scheduler.handoffs, entry.sequence
        handoff = entry.machine.handoff
        for action in actions:
            match action:
                case Send(message):
                    self._network.send(entry.peer, message)
                case Reserve():
                    handoffs.invite(sequence)
                case OpenLease(slots):
                    self._receiver.open(handoff, slots)
                case Fence():
                    self._receiver.fence(handoff)
                case LocalFallback(num_blocks):
                    self._count(entry, num_blocks, now)
                    self._memory.mark_written(sequence.block_table[sequence.num_committed :])
                    handoffs.compute_here(sequence, num_blocks, now)
                case Quarantine():
                    handoffs.quarantine(sequence, handoff, now)
                case FreeQuarantined():
                    handoffs.free_quarantined(handoff)
        if entry.machine.is_over:
            self._by_request.pop(sequence.request_id, None)
        if entry.machine.is_released:
            self._entries.pop(handoff, None)

    def _count(self, entry: _Entry, num_blocks: int, now: float) -> None:
        if num_blocks:
            self._num_read[entry.machine.handoff] = num_blocks
            self._meter.observe(num_blocks, now - entry.machine.asked_s, now=now)
