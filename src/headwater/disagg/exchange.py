"""An instance's hand-offs, both ways: events in, messages, pushes and scheduling out.

Belongs to the loop's thread. Everything from outside arrives as an event that was posted to
the loop's one inbox: peers' messages, lost connections, the ends of pushes, landed blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from headwater.disagg.decodes import DecodeHandoffs
from headwater.disagg.fetches import PeerReads
from headwater.disagg.handoff import HandoffConfig
from headwater.disagg.hands import HandoffDependencies
from headwater.disagg.link import Landed, PushDone, PushFailed, SenderQuiet
from headwater.disagg.loans import PeerReadServer
from headwater.disagg.messages import (
    Accepted,
    Ask,
    Failed,
    First,
    Pull,
    Renew,
    StartRefused,
)
from headwater.disagg.network import PeerLost, PeerMessage
from headwater.disagg.outcomes import SideTotals
from headwater.disagg.prefills import PrefillHandoffs
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.request import Request
from headwater.scheduler.scheduler import Scheduler
from headwater.types import RequestId

_TO_DECODE = (Accepted, StartRefused, Ask, Renew, First, Failed, Pull)


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Both sides' counts, and what is in flight now."""

    prefill: SideTotals
    decode: SideTotals
    num_prefilling: int
    num_receiving: int


class HandoffController:
    """What the engine loop knows of peers."""

    def __init__(
        self,
        scheduler: Scheduler,
        hands: HandoffDependencies,
        config: HandoffConfig,
        *,
        accepts: bool = True,
    ) -> None:
        """`hands` belong to it from now on. With `accepts` it computes prompts for others."""
        self._handoffs = scheduler.handoffs
        self._return_after_s = config.return_after_s
        new_job = count(1).__next__
        self._network = hands.network
        self.fetches = PeerReads(scheduler, hands, config)
        self.loans = PeerReadServer(scheduler, hands, config, new_job)
        self.prefills = PrefillHandoffs(
            scheduler, hands, config, self.fetches, new_job=new_job, accepts=accepts
        )
        self.decodes = DecodeHandoffs(scheduler, hands, config, self.loans)

    @property
    def wake_s(self) -> float | None:
        """When there is something to do although nothing came."""
        ends = (self.prefills.wake_s, self.decodes.wake_s, self.fetches.wake_s)
        return min((end for end in ends if end is not None), default=None)

    def add(self, request: Request, now: float) -> None:
        """Take a request whose prompt is computed elsewhere."""
        self.decodes.add(request, now)

    def abort(self, request_id: RequestId, now: float) -> None:
        """A request of this instance is about to be ended. Others are ignored."""
        self.decodes.abort(request_id, now)

    def land(self, events: Iterable[object], now: float) -> None:
        """Take in what was posted, and what is due by now."""
        for event in events:
            match event:
                case PeerMessage(peer, message):
                    if isinstance(message, _TO_DECODE):
                        self.decodes.receive(peer, message, now)
                    else:
                        self.prefills.receive(peer, message, now)
                case PeerLost(peer, reason):
                    self.decodes.lost(peer, reason, now)
                    self.prefills.lost(peer, now)
                case PushDone() | PushFailed():
                    if not self.loans.land(event, now):
                        self.prefills.land(event, now)
                case Landed() | SenderQuiet():
                    self.decodes.land(event, now)
                    self.fetches.land(event, now)
                case _:
                    raise TypeError(f"no event for hand-offs: {event!r}")
        self.prefills.tick(now)
        self.fetches.tick(now)
        self.decodes.tick(now)

    def start(self, now: float) -> None:
        """A step was scheduled, and is about to be computed."""
        self.fetches.start(now)
        self.prefills.start(now)
        self.decodes.start(now)
        self._handoffs.give_back(self._return_after_s, now)

    def settle(self, outputs: list[SequenceOutput], now: float) -> list[SequenceOutput]:
        """A step was collected. The outputs for this instance's own clients."""
        return self.prefills.settle(outputs, now)

    def stats(self) -> HandoffCounts:
        """A snapshot."""
        return HandoffCounts(
            prefill=self.prefills.totals,
            decode=self.decodes.totals,
            num_prefilling=self.prefills.num_active,
            num_receiving=self.decodes.num_active,
        )

    def close(self) -> None:
        """Give up what is in flight, and every connection. Twice is safe."""
        self._network.close()
        self.prefills.close()
        self.decodes.close()
