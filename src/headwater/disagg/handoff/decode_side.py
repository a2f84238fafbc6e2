"""Hand-offs that this instance decodes: carries out what their state machines decide."""

from dataclasses import dataclass

from headwater.disagg.handoff.reads import PeerReadServer
from headwater.disagg.handoff.resources import Ended, HandoffDependencies, SideTotals
from headwater.disagg.protocol.actions import (
    Decline,
    DecodeAction,
    DeliverFirstToken,
    Fence,
    FreeQuarantined,
    LocalFallback,
    OpenLease,
    Quarantine,
    Reserve,
    Send,
)
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.decode import DecodeHandoff
from headwater.disagg.protocol.messages import (
    Cancel,
    Failed,
    First,
    HandoffDone,
    Pull,
    Pulled,
    Reason,
    Start,
    StartRefused,
    ToDecode,
)
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed
from headwater.scheduler.request import Request
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId


@dataclass(slots=True, eq=False)
class _Entry:
    """One hand-off, its sequence, and the peer that computes the prompt."""

    machine: DecodeHandoff
    sequence: Sequence
    peer: str
    connection: int = 0
    """Number of the connection on which Start was sent. A hand-off lives and ends with it."""


class DecodeSide:
    """Requests of this instance whose prompts are computed by other instances."""

    def __init__(
        self,
        scheduler: Scheduler,
        dependencies: HandoffDependencies,
        config: HandoffConfig,
        read_server: PeerReadServer,
    ) -> None:
        self._scheduler = scheduler
        self._network = dependencies.network
        self._receiver = dependencies.receiver
        self._memory = dependencies.memory
        self._new_id = dependencies.new_id
        self._config = config
        self._read_server = read_server
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[RequestId, _Entry] = {}
        self._unresponsive_until_s: dict[str, float] = {}
        """Peers that did not answer in time, each with a time. Before that time, new hand-offs
        to the peer fail at once."""
        self._ended = Ended()
        self.totals = SideTotals()

    @property
    def num_active(self) -> int:
        """Number of hand-offs that have not ended."""
        return len(self._by_request)

    @property
    def wake_s(self) -> float | None:
        """The next deadline of a state machine; None if there is none."""
        ends = [entry.machine.wake_s for entry in self._entries.values()]
        end = min(ends, default=float("inf"))
        return None if end == float("inf") else end

    def add(self, request: Request, now: float) -> None:
        """Start a hand-off to `request.prefill`. RequestError if the request cannot be
        served."""
        sequence = self._scheduler.add(request)
        self._scheduler.handoffs.expect(sequence)
        start = Start(
            handoff=self._new_id(),
            request=request,
            link=self._receiver.address,
            num_found=self._num_found(sequence),
            within_s=self._config.handoff_timeout_s,
        )
        machine = DecodeHandoff(
            start,
            self._config,
            block_bytes=self._memory.block_bytes,
            local_fallback=request.local_fallback,
        )
        entry = _Entry(machine, sequence, request.prefill)
        self._entries[start.handoff] = self._by_request[request.request_id] = entry
        actions = machine.begin(now)
        if self._unresponsive_until_s.get(entry.peer, now) > now:
            actions = machine.lost(Reason.UNREACHABLE, now)
        self._do(entry, actions, now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End the hand-off of a request that is about to be aborted. Slots that a peer may
        still write to stay quarantined."""
        entry = self._by_request.get(request_id)
        if entry is not None:
            self._do(entry, entry.machine.abort(now), now)

    def receive(self, peer: str, connection: int, message: ToDecode, now: float) -> None:
        """Process a message of a prefill instance."""
        self._unresponsive_until_s.pop(peer, None)
        entry = self._entries.get(message.handoff)
        if entry is None:
            self._answer_late(peer, message)
        elif isinstance(message, Pull):
            path = entry.sequence.path(entry.sequence.prompt_tokens)
            self._read_server.serve(peer, connection, message, path, now)
        elif (
            entry.peer == peer
        ):  # only the peer with which the hand-off was started may send messages about it
            self._do(entry, entry.machine.receive(message, now), now)

    def lost(self, peer: str, connection: int, reason: Reason, now: float) -> None:
        """End the hand-offs of a connection that ended or could not be made."""
        self._unresponsive_until_s.pop(peer, None)
        self._read_server.lost(peer, connection)
        for entry in list(self._by_request.values()):
            if entry.connection == connection:
                self._do(entry, entry.machine.lost(reason, now), now)

    def link_event(self, event: BlockReceived | LeaseClosed, now: float) -> None:
        """Process a received block, or the end of the lease of a hand-off."""
        entry = self._entries.get(event.lease)
        if entry is None:
            return
        if isinstance(event, BlockReceived):
            self._do(
                entry, entry.machine.block_received(event.block, event.num_bytes, now), now
            )
        else:
            self._do(entry, entry.machine.lease_closed(event.num_bytes, event.blocks, now), now)

    def tick(self, now: float) -> None:
        """Process deadlines that have passed."""
        for entry in list(self._entries.values()):
            if entry.machine.wake_s <= now:
                self._do(entry, entry.machine.tick(now), now)
                if entry.machine.outcome in (Reason.UNREACHABLE, Reason.EXPIRED):
                    self._note_unresponsive(entry.peer, now)

    def reserved(self, sequence: Sequence, now: float) -> bool:
        """Let P send the blocks of `sequence` to the slots that the scheduler gave it. Returns
        False if it does not belong to a hand-off."""
        entry = self._by_request.get(sequence.request_id)
        if entry is None:
            return False
        first = sequence.num_committed
        slots = sequence.block_table[first:].tolist()
        self._do(entry, entry.machine.reserved(first, slots, now), now)
        return True

    def close(self) -> None:
        """Close the receiver and stop serving peer reads. Calling it twice is safe."""
        self._read_server.close()
        self._receiver.close()

    def _note_unresponsive(self, peer: str, now: float) -> None:
        """Refuse hand-offs to `peer` for a term. Entries that have expired are dropped, so the
        table has no more entries than peers that failed within one term."""
        until_s = self._unresponsive_until_s
        for expired in [name for name, end_s in until_s.items() if end_s <= now]:
            del until_s[expired]
        until_s[peer] = now + self._config.term_s

    def _num_found(self, sequence: Sequence) -> int:
        """Leading blocks of the prompt that this instance has cached, and that P may read from
        it."""
        if not self._scheduler.config.prefix_caching:
            return 0
        longest = (sequence.num_tokens - 1) // self._scheduler.cache.block_tokens
        return self._scheduler.cache.match(sequence.path(), max_blocks=longest).device_blocks

    def _answer_late(self, peer: str, message: ToDecode) -> None:
        """Tell P how a hand-off ended that is no longer known here."""
        if isinstance(message, Pull):
            self._network.send(peer, Pulled(message.handoff, 0))
        elif not isinstance(message, Failed | StartRefused):
            done = self._ended.was_done(message.handoff)
            answer = (
                HandoffDone(message.handoff) if done else Cancel(message.handoff, Reason.GONE)
            )
            self._network.send(peer, answer)

    def _do(self, entry: _Entry, actions: list[DecodeAction], now: float) -> None:
        for action in actions:
            if isinstance(action, Send):
                connection = self._network.send(entry.peer, action.message)
                entry.connection = entry.connection or connection
            elif isinstance(action, OpenLease):
                self._receiver.open(entry.machine.handoff, action.slots)
            elif isinstance(action, Fence):
                self._receiver.fence(entry.machine.handoff)
            else:
                self._schedule(entry, action, now)
        if entry.machine.is_over:
            self._note_over(entry)

    def _schedule(self, entry: _Entry, action: DecodeAction, now: float) -> None:
        """Carry out an action on the sequence and its slots."""
        handoffs, sequence = self._scheduler.handoffs, entry.sequence
        handoff = entry.machine.handoff
        match action:
            case Reserve():
                self.totals.num_asks += 1
                handoffs.invite(sequence)
            case DeliverFirstToken(first):
                self._mark(sequence)
                handoffs.deliver(sequence, first.token, first.logprobs, first.usage, now)
                self._count_done(entry.machine, first)
            case LocalFallback(num_blocks):
                self._mark(sequence)
                handoffs.compute_here(sequence, num_blocks, now)
            case Decline(reason):
                handoffs.decline(sequence, reason, now)
            case Quarantine():
                handoffs.quarantine(sequence, handoff, now)
            case FreeQuarantined():
                handoffs.free_quarantined(handoff)

    def _mark(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RECEIVING:
            self._memory.mark_written(sequence.block_table[sequence.num_committed :])

    def _count_done(self, machine: DecodeHandoff, first: First) -> None:
        totals, timings = self.totals, first.timings
        totals.num_done += 1
        totals.num_bytes += machine.num_bytes
        parts = {
            "start": machine.accepted_s - machine.began_s,
            "queue": timings.queue_s,
            "ask": timings.ask_s,
            "compute": timings.compute_s,
            "push": machine.ended_s - machine.first_s,
            "first_token": machine.ended_s - machine.began_s,
        }
        for part, seconds in parts.items():
            totals.seconds[part] = totals.seconds.get(part, 0.0) + seconds

    def _note_over(self, entry: _Entry) -> None:
        machine = entry.machine
        known = self._by_request.pop(entry.sequence.request_id, None)
        if known is not None and machine.outcome is not None:
            self.totals.failures[machine.outcome] += 1
        if machine.is_released:
            self._entries.pop(machine.handoff, None)
            self._ended.note(machine.handoff, machine.outcome)
