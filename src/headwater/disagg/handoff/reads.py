"""Peer reads: a prefill instance (P) gets blocks of a prompt that only the decode instance has.

`PeerReadClient` runs on P and asks for the blocks. `PeerReadServer` runs on D and sends them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.cache import Lease, TokenPath
from headwater.disagg.handoff.resources import HandoffDependencies, SenderPool
from headwater.disagg.links.interface import Sender
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
from headwater.disagg.protocol.messages import Pull, Pulled, Start
from headwater.disagg.protocol.peer_read import PeerRead, PeerReadAction
from headwater.disagg.protocol.push import (
    BlockPiece,
    BlockReceived,
    LeaseClosed,
    Push,
    PushDone,
    PushFailed,
)
from headwater.errors import ConfigError
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import Sequence
from headwater.transfer.mover import LinkMeter
from headwater.types import RequestId

_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0
"""First and longest time for which a peer is not asked again after a failed read. Each further
failure doubles the time.
"""


@dataclass(slots=True, eq=False)
class _Entry:
    machine: PeerRead
    sequence: Sequence
    peer: str


@dataclass(slots=True)
class _Pause:
    """Time without reads from a peer, after one failed."""

    until_s: float = 0.0
    next_s: float = _FIRST_PAUSE_S


class PeerReadClient:
    """Reads blocks from the decode instance if that is faster than computing them."""

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
        self._pauses: dict[str, _Pause] = {}
        """Pauses by peer, until the next read that succeeds or the end of the connection."""

    @property
    def wake_s(self) -> float | None:
        """The next deadline of a peer read; None if there is none."""
        end = min((w.machine.wake_s for w in self._entries.values()), default=float("inf"))
        return None if end == float("inf") else end

    def begin(self, start: Start, sequence: Sequence, peer: str, now: float) -> None:
        """Read the blocks that D has and `sequence` lacks, if that is faster than computing
        them."""
        pause = self._pauses.get(peer)
        if pause is not None and now < pause.until_s:
            return
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
        """Process D's answer: D sends `num_blocks` blocks."""
        if (entry := self._entries.get(handoff)) is not None:
            self._do(entry, entry.machine.announced(num_blocks, now), now)

    def abort(self, handoff: int, now: float) -> None:
        """End the peer read of a hand-off that is over, and whose sequence is about to be
        aborted."""
        self._num_read.pop(handoff, None)
        if (entry := self._entries.get(handoff)) is not None:
            self._do(entry, entry.machine.abort(), now)

    def lost(self, peer: str) -> None:
        """Forget the pause of a decode instance whose connection ended."""
        self._pauses.pop(peer, None)

    def link_event(self, event: BlockReceived | LeaseClosed, now: float) -> None:
        """Process a received block, or the end of the lease of a peer read."""
        entry = self._entries.get(event.lease)
        if entry is None:
            return
        if isinstance(event, BlockReceived):
            self._do(
                entry, entry.machine.block_received(event.block, event.num_bytes, now), now
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
        if entry.machine.is_over and sequence.request_id in self._by_request:
            del self._by_request[sequence.request_id]
            self._note_outcome(entry, now)
        if entry.machine.is_released:
            self._entries.pop(handoff, None)

    def _note_outcome(self, entry: _Entry, now: float) -> None:
        """Pause reads from a peer that failed to send blocks: a link that does not work in this
        direction would otherwise delay each prompt by the time that the failure takes."""
        machine, peer = entry.machine, entry.peer
        if machine.num_read:
            self._pauses.pop(peer, None)
        elif machine.has_failed:
            pause = self._pauses.setdefault(peer, _Pause())
            pause.until_s = now + pause.next_s
            pause.next_s = min(2 * pause.next_s, _LONGEST_PAUSE_S)

    def _count(self, entry: _Entry, num_blocks: int, now: float) -> None:
        if num_blocks:
            self._num_read[entry.machine.handoff] = num_blocks
            self._meter.observe(num_blocks, now - entry.machine.asked_s, now=now)


class _Job(NamedTuple):
    """A push of a peer read."""

    lease: Lease
    peer: str
    handoff: int


class PeerReadServer:
    """Pins the requested blocks, pushes them, and releases them when the push has ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        dependencies: HandoffDependencies,
        config: HandoffConfig,
        new_job: Callable[[], int],
    ) -> None:
        self._cache = scheduler.cache
        self._network = dependencies.network
        self._config = config
        self._block_bytes = dependencies.memory.block_bytes
        self._new_job = new_job
        self._jobs: dict[int, _Job] = {}
        self._senders = SenderPool(dependencies.connect)

    def serve(
        self, peer: str, connection: int, pull: Pull, path: TokenPath, now: float
    ) -> None:
        """Push the requested blocks that are cached here, and tell P how many they are."""
        end = min(pull.start_block + pull.num_blocks, path.num_blocks(self._cache.block_tokens))
        match = self._cache.match(path, max_blocks=max(end, 0))
        count = max(match.device_blocks - pull.start_block, 0)
        sender = self._sender(_key(peer, connection), pull.link) if count else None
        count = 0 if sender is None else count
        self._network.send(peer, Pulled(pull.handoff, count))
        if sender is None:
            return
        owner = RequestId(f"peer-read-{pull.handoff:016x}")
        lease = self._cache.lease(match, owner=owner, now=now, counted=False)
        job = self._new_job()
        self._jobs[job] = _Job(lease, peer, pull.handoff)
        slots = lease.slots[pull.start_block :].tolist()
        sender.push(
            Push(
                job=job,
                lease=pull.handoff,
                pieces=tuple(
                    BlockPiece(slot, at, self._block_bytes) for at, slot in enumerate(slots)
                ),
                deadline_s=now + self._config.pull_timeout_s,
            )
        )

    def finish_push(self, event: PushDone | PushFailed, now: float) -> bool:
        """Process the end of a push. False if it was not a push of a peer read."""
        ended = self._jobs.pop(event.job, None)
        if ended is None:
            return False
        self._cache.release(ended.lease, now=now)
        if isinstance(event, PushFailed):
            # P computes the blocks at once, instead of waiting for its own timeout.
            self._network.send(ended.peer, Pulled(ended.handoff, 0))
        return True

    def lost(self, peer: str, connection: int) -> None:
        """The connection to a prefill instance ended: close its senders."""
        self._senders.close(_key(peer, connection))

    def close(self) -> None:
        """Cancel every push. Calling it twice is safe."""
        self._senders.close_all()

    def _sender(self, key: str, link: str) -> Sender | None:
        """The sender to `link`; None if that is not a valid address."""
        try:
            return self._senders.get(key, link)
        except ConfigError:
            return None


def _key(peer: str, connection: int) -> str:
    """Identifies one connection to a peer. Its senders are closed when the connection ends, and
    only then."""
    return f"{peer}#{connection}"
