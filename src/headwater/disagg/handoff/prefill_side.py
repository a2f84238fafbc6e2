"""Hand-offs that this instance prefills: carries out what their state machines decide."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.disagg.handoff.reads import PeerReadClient
from headwater.disagg.handoff.resources import (
    Ended,
    HandoffDependencies,
    SenderPool,
    SideTotals,
)
from headwater.disagg.protocol.actions import (
    CancelPushes,
    ExtendPushes,
    PrefillAction,
    PushBlocks,
    Release,
    Send,
    Withdraw,
)
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import (
    Ask,
    Failed,
    Grant,
    Pulled,
    Reason,
    Start,
    StartRefused,
    ToPrefill,
)
from headwater.disagg.protocol.prefill import PrefillHandoff
from headwater.disagg.protocol.push import PushDone, PushFailed
from headwater.errors import ConfigError, PromptTooLong, RequestError
from headwater.scheduler.request import Request, SequenceOutput, Usage
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import Sequence
from headwater.types import RequestId


@dataclass(slots=True, eq=False)
class _Entry:
    """One hand-off, the sequence that computes it, and the peer that receives its blocks."""

    machine: PrefillHandoff
    sequence: Sequence
    peer: str


class PrefillSide:
    """Computes prompts for peers, each as an ordinary request that generates one token."""

    def __init__(
        self,
        scheduler: Scheduler,
        dependencies: HandoffDependencies,
        config: HandoffConfig,
        reads: PeerReadClient,
        *,
        new_job: Callable[[], int],
        accepts: bool = True,
    ) -> None:
        """Without `accepts`, every Start is refused: this instance has another role."""
        self._scheduler = scheduler
        self._network = dependencies.network
        self._block_bytes = dependencies.memory.block_bytes
        self._config = config
        self._reads = reads
        self._new_job = new_job
        self._accepts = accepts
        self._entries: dict[int, _Entry] = {}
        self._by_request: dict[RequestId, _Entry] = {}
        """Requests whose outputs are for a state machine, not for a client of this instance.
        An entry stays until the scheduler has reported the end of its request."""
        self._jobs: dict[int, _Entry] = {}
        self._senders = SenderPool(dependencies.connect)
        self._ended = Ended()
        self.totals = SideTotals()

    @property
    def num_active(self) -> int:
        """Number of hand-offs in flight. `max_inflight` limits it."""
        return sum(not entry.machine.is_over for entry in self._entries.values())

    @property
    def wake_s(self) -> float | None:
        """The next deadline of a state machine; None if there is none."""
        ends = [entry.machine.wake_s for entry in self._entries.values()]
        end = min(ends, default=float("inf"))
        return None if end == float("inf") else end

    def receive(self, peer: str, message: ToPrefill, now: float) -> None:
        """Process a message of a decode instance."""
        entry = self._entries.get(message.handoff)
        if entry is not None:
            # only the peer that started the hand-off may send messages about it
            if entry.peer != peer:
                return
            if isinstance(message, Pulled):
                self._reads.announced(message.handoff, message.num_blocks, now)
            else:
                self._do(entry, entry.machine.receive(message, now), now)
        elif isinstance(message, Start):
            self._begin(peer, message, now)
        elif isinstance(message, Grant):
            self._network.send(peer, Failed(message.handoff, Reason.GONE))

    def lost(self, peer: str, now: float) -> None:
        """The connection to a decode instance ended: end its hand-offs and close its senders."""
        for entry in list(self._entries.values()):
            if entry.peer == peer:
                self._do(entry, entry.machine.lost(now), now)
        self._senders.close(peer)

    def finish_push(self, event: PushDone | PushFailed, now: float) -> None:
        """Process the end of a push."""
        entry = self._jobs.pop(event.job, None)
        if entry is None:
            return
        if isinstance(event, PushDone):
            self.totals.num_bytes += event.num_bytes
            self._do(entry, entry.machine.pushed(event.job, event.num_bytes, now), now)
        else:
            self._do(entry, entry.machine.push_failed(event.job, now), now)

    def tick(self, now: float) -> None:
        """Process deadlines that have passed."""
        for entry in list(self._entries.values()):
            if entry.machine.wake_s <= now:
                self._do(entry, entry.machine.tick(now), now)

    def admitted(self, sequence: Sequence, now: float) -> None:
        """The scheduler begins to compute `sequence`: ask D where its blocks go."""
        if (entry := self._by_request.get(sequence.request_id)) is not None:
            self._do(entry, entry.machine.admitted(now), now)

    def computed(self, sequence: Sequence, now: float) -> None:
        """More KV of `sequence` is in its blocks: push the blocks that are full."""
        entry = self._by_request.get(sequence.request_id)
        if entry is not None and sequence.num_blocks:
            tokens, table = sequence.num_computed, sequence.block_table
            self._do(entry, entry.machine.computed(tokens, table, now), now)

    def take(self, output: SequenceOutput, now: float) -> bool:
        """Take the first token of a hand-off. False if `output` is for a client."""
        entry = self._by_request.get(output.request_id)
        if entry is None:
            return False
        if output.tokens and output.usage is not None:
            usage = self._with_peer_reads(output.usage, entry.machine.handoff)
            token, logprobs = output.tokens[0], output.logprobs[0]
            self._do(entry, entry.machine.first_token(token, logprobs, usage, now), now)
        elif output.finish_reason is not None:
            self._do(entry, entry.machine.dropped(now), now)
        if output.finish_reason is not None:
            del self._by_request[output.request_id]
        return True

    def close(self) -> None:
        """Cancel every push. Calling it twice is safe."""
        self._senders.close_all()

    def _begin(self, peer: str, start: Start, now: float) -> None:
        if start.handoff in self._ended:
            self._network.send(peer, Failed(start.handoff, Reason.GONE))
            return
        sequence = self._submit(peer, start, now)
        if isinstance(sequence, Reason):
            self.totals.failures[sequence] += 1
            self._network.send(peer, StartRefused(start.handoff, sequence))
            return
        machine = PrefillHandoff(
            start,
            self._config,
            block_tokens=self._scheduler.cache.block_tokens,
            block_bytes=self._block_bytes,
            new_job=self._new_job,
        )
        entry = _Entry(machine, sequence, peer)
        self._entries[start.handoff] = entry
        self._by_request[sequence.request_id] = entry
        self._scheduler.handoffs.pin(sequence)
        self._do(entry, machine.begin(now), now)
        self._reads.begin(start, sequence, peer, now)

    def _submit(self, peer: str, start: Start, now: float) -> Sequence | Reason:
        """Add the request to the scheduler's queue, or return the reason for refusing it."""
        if not self._accepts:
            return Reason.ROLE
        if self._scheduler.stats().is_paused:
            return Reason.DRAINING
        if self.num_active >= self._config.max_inflight:
            return Reason.BUSY
        try:
            self._senders.get(peer, start.link)
            return self._scheduler.add(_own_request(start, now))
        except PromptTooLong:
            return Reason.TOO_LONG
        except (RequestError, ConfigError):
            return Reason.INVALID

    def _with_peer_reads(self, usage: Usage, handoff: int) -> Usage:
        """Blocks read from a peer were found on the device; report them as found at the peer."""
        num_tokens = self._reads.take_num_read(handoff) * self._scheduler.cache.block_tokens
        num_tokens = min(num_tokens, usage.by_tier.get("device", 0))
        if not num_tokens:
            return usage
        tiers = dict(usage.by_tier)
        tiers["device"] -= num_tokens
        tiers["peer"] = tiers.get("peer", 0) + num_tokens
        return replace(usage, by_tier=tiers)

    def _do(self, entry: _Entry, actions: list[PrefillAction], now: float) -> None:
        machine = entry.machine
        for action in actions:
            match action:
                case Send(message):
                    self.totals.num_asks += isinstance(message, Ask)
                    self._network.send(entry.peer, message)
                case PushBlocks(push):
                    self._jobs[push.job] = entry
                    self._senders.get(entry.peer, machine.start.link).push(push)
                case ExtendPushes(deadline_s):
                    sender = self._senders.get(entry.peer, machine.start.link)
                    sender.extend(machine.handoff, deadline_s)
                case CancelPushes():
                    self._senders.get(entry.peer, machine.start.link).cancel(machine.handoff)
                case Withdraw():
                    self._reads.abort(machine.handoff, now)
                    self._scheduler.abort(entry.sequence.request_id, now=now)
                case Release():
                    self._forget(entry, now)

    def _forget(self, entry: _Entry, now: float) -> None:
        machine = entry.machine
        self._scheduler.handoffs.unpin(entry.sequence, now)
        del self._entries[machine.handoff]
        self._ended.note(machine.handoff, machine.outcome)
        if machine.outcome is None:
            self.totals.num_done += 1
        else:
            self.totals.failures[machine.outcome] += 1


def _own_request(start: Start, now: float) -> Request:
    """The same prompt as a local request with its own name, which generates one token."""
    request = start.request
    params, most = request.params, request.num_resumed_tokens + 1
    return replace(
        request,
        request_id=RequestId(f"prefill-{start.handoff:016x}"),
        params=replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most)),
        arrival_s=now,
        prefill="",
    )
