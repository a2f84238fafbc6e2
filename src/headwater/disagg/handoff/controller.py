"""All hand-offs of one instance, in both roles: events in; messages, pushes and scheduling out.

Used by the engine loop's thread only. Everything from outside arrives as an event in the loop's
one inbox: messages of peers, lost connections, ends of pushes, received blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from headwater.disagg.handoff.decode_side import DecodeSide
from headwater.disagg.handoff.prefill_side import PrefillSide
from headwater.disagg.handoff.reads import PeerReadClient, PeerReadServer
from headwater.disagg.handoff.resources import HandoffDependencies, SideTotals
from headwater.disagg.peering.network import PeerLost, PeerMessage
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import (
    Accepted,
    Ask,
    Failed,
    First,
    Pull,
    Renew,
    StartRefused,
)
from headwater.disagg.protocol.push import BlockReceived, LeaseClosed, PushDone, PushFailed
from headwater.scheduler.request import Request
from headwater.scheduler.results import StepOutputs
from headwater.scheduler.scheduler import Scheduler
from headwater.scheduler.sequence import SequenceState
from headwater.types import RequestId

_TO_DECODE = (Accepted, StartRefused, Ask, Renew, First, Failed, Pull)


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Counts of both sides, and the hand-offs in flight now."""

    prefill: SideTotals
    decode: SideTotals
    num_prefilling: int
    num_receiving: int


class HandoffController:
    """The engine loop's interface to hand-offs."""

    def __init__(
        self,
        scheduler: Scheduler,
        dependencies: HandoffDependencies,
        config: HandoffConfig,
        *,
        accepts: bool = True,
    ) -> None:
        """Takes ownership of `dependencies`. With `accepts` it computes prompts for peers."""
        self._handoffs = scheduler.handoffs
        self._return_after_s = config.return_after_s
        new_job = count(1).__next__
        self._network = dependencies.network
        self.reads = PeerReadClient(scheduler, dependencies, config)
        self.read_server = PeerReadServer(scheduler, dependencies, config, new_job)
        self.prefill_side = PrefillSide(
            scheduler, dependencies, config, self.reads, new_job=new_job, accepts=accepts
        )
        self.decode_side = DecodeSide(scheduler, dependencies, config, self.read_server)

    @property
    def wake_s(self) -> float | None:
        """The next deadline; None if there is none."""
        ends = (self.prefill_side.wake_s, self.decode_side.wake_s, self.reads.wake_s)
        return min((end for end in ends if end is not None), default=None)

    def add(self, request: Request, now: float) -> None:
        """Take a request whose prompt another instance computes."""
        self.decode_side.add(request, now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """End the hand-off of a request that is about to be aborted. Unknown requests are
        ignored."""
        self.decode_side.abort(request_id, now)

    def receive(self, events: Iterable[object], now: float) -> None:
        """Process posted events, then deadlines that have passed."""
        for event in events:
            match event:
                case PeerMessage(peer, message, connection):
                    if isinstance(message, _TO_DECODE):
                        self.decode_side.receive(peer, connection, message, now)
                    else:
                        self.prefill_side.receive(peer, message, now)
                case PeerLost(peer, reason, connection):
                    self.decode_side.lost(peer, connection, reason, now)
                    self.prefill_side.lost(peer, now)
                    self.reads.lost(peer)
                case PushDone() | PushFailed():
                    if not self.read_server.finish_push(event, now):
                        self.prefill_side.finish_push(event, now)
                case BlockReceived() | LeaseClosed():
                    self.decode_side.link_event(event, now)
                    self.reads.link_event(event, now)
                case _:
                    raise TypeError(f"not an event of hand-offs: {event!r}")
        self.prefill_side.tick(now)
        self.reads.tick(now)
        self.decode_side.tick(now)

    def step_scheduled(self, now: float) -> None:
        """A step was scheduled: act on the sequences that it admitted, and return preempted
        requests that have waited too long to resume."""
        for sequence in self._handoffs.take_admitted():
            if sequence.state is not SequenceState.RECEIVING:
                self.prefill_side.admitted(sequence, now)
            elif not self.decode_side.reserved(sequence, now):
                self.reads.reserved(sequence, now)
        self._handoffs.give_back(self._return_after_s, now)

    def step_finished(self, outputs: StepOutputs, now: float) -> StepOutputs:
        """A step was computed: send its KV. Returns the outputs for this instance's clients.

        A prefill hand-off generates one token. Its output has the prompt usage, too, so it is
        always in `others`."""
        for sequence in self._handoffs.take_computed():
            self.prefill_side.computed(sequence, now)
        outputs.others = [o for o in outputs.others if not self.prefill_side.take(o, now)]
        return outputs

    def stats(self) -> HandoffCounts:
        """A snapshot of the counts."""
        return HandoffCounts(
            prefill=self.prefill_side.totals,
            decode=self.decode_side.totals,
            num_prefilling=self.prefill_side.num_active,
            num_receiving=self.decode_side.num_active,
        )

    def close(self) -> None:
        """Cancel everything in flight and close every connection. Calling it twice is safe."""
        self._network.close()
        self.prefill_side.close()
        self.decode_side.close()
