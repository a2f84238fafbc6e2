"""State machine of a peer read: P gets a prefix from D before it computes the rest. Pure.

    begin ─▶ WAITING ── slots ─▶ RECEIVING ── complete · late ─▶ FENCING ── closed ─▶ over

However it ends, P computes the blocks that it did not get.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import TypeAlias

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
from headwater.disagg.protocol.decode import ReceiveTracker
from headwater.disagg.protocol.messages import Pull, Reason

PeerReadAction: TypeAlias = (
    Send | Reserve | OpenLease | Fence | LocalFallback | Quarantine | FreeQuarantined
)
Actions = list[PeerReadAction]

_NEVER = float("inf")


class PeerReadState(Enum):
    """Progress of a peer read."""

    WAITING = auto()
    RECEIVING = auto()
    FENCING = auto()
    OVER = auto()


class PeerRead:
    """Blocks that P reads from D. It ends exactly once, with the blocks that arrived."""

    def __init__(
        self, handoff: int, num_found: int, config: HandoffConfig, *, block_bytes: int
    ) -> None:
        """D said that it has the first `num_found` blocks."""
        self.handoff = handoff
        self.state = PeerReadState.WAITING
        self.num_read = 0
        """Leading blocks that arrived complete; set when the read is over."""
        self.asked_s = 0.0
        self._num_found = num_found
        self._config = config
        self._block_bytes = block_bytes
        self._tracker: ReceiveTracker | None = None
        self._num_announced: int | None = None
        self._num_promised = 0
        self._is_quarantined = False
        self._end_s = _NEVER

    @property
    def is_over(self) -> bool:
        return self.state is PeerReadState.OVER

    @property
    def is_released(self) -> bool:
        """Whether it is over and no slot of it is quarantined."""
        return self.is_over and not self._is_quarantined

    @property
    def has_failed(self) -> bool:
        """Whether D was asked, and did not answer or sent fewer blocks than it announced."""
        was_asked = self._tracker is not None
        return was_asked and (self._num_announced is None or self.num_read < self._num_promised)

    @property
    def wake_s(self) -> float:
        """When `tick` has something to do."""
        return _NEVER if self.is_over else self._end_s

    def begin(self) -> Actions:
        """Ask for slots for the whole prompt first."""
        return [Reserve()]

    def reserved(
        self, start_block: int, slots: Sequence[int], link: str, now: float
    ) -> Actions:
        """The scheduler found room: ask D for the missing blocks. P itself has the blocks
        before `start_block`."""
        if self.state is not PeerReadState.WAITING:
            return []
        wanted = min(self._num_found - start_block, len(slots))
        if wanted <= 0:
            return self._over([LocalFallback(0, Reason.GONE)])
        self.state = PeerReadState.RECEIVING
        self.asked_s = now
        self._end_s = now + self._config.pull_timeout_s
        self._tracker = ReceiveTracker(wanted, self._block_bytes)
        pull = Pull(handoff=self.handoff, link=link, start_block=start_block, num_blocks=wanted)
        return [OpenLease(slots[:wanted]), Send(pull)]

    def announced(self, num_blocks: int, now: float) -> Actions:
        """Process the number of blocks that D sends; 0 after another number reports a failed
        push."""
        self._num_announced = num_blocks
        self._num_promised = max(self._num_promised, num_blocks)
        return self._fence_if_whole(now)

    def block_received(self, index: int, num_bytes: int, now: float) -> Actions:
        """Count a block that the link wrote to its slot."""
        if self._tracker is None:
            return []
        self._tracker.add(index, num_bytes)
        return self._fence_if_whole(now)

    def lease_closed(self, blocks: frozenset[int]) -> Actions:
        """The link writes nothing more to the slots: let P compute the blocks that it did not
        get, or free quarantined slots."""
        if self._is_quarantined:
            self._is_quarantined = False
            return [FreeQuarantined()]
        if self.is_over or self._tracker is None:
            return []
        self.num_read = self._tracker.num_leading(blocks)
        return self._over([LocalFallback(self.num_read, Reason.GONE)])

    def abort(self) -> Actions:
        """End the peer read of an aborted hand-off. Slots that D may still write to stay
        quarantined until the lease is closed."""
        if self.state in (PeerReadState.WAITING, PeerReadState.OVER):
            self.state = PeerReadState.OVER
            return []
        fence: Actions = [Fence()] if self.state is PeerReadState.RECEIVING else []
        self._is_quarantined = True
        return self._over([*fence, Quarantine()])

    def tick(self, now: float) -> Actions:
        """Give up on blocks that did not arrive in time."""
        if now < self._end_s:
            return []
        if self.state is PeerReadState.RECEIVING:
            return self._fence(now)
        if self.state is PeerReadState.FENCING:
            self._is_quarantined = True
            return self._over([Quarantine(), LocalFallback(0, Reason.TIMEOUT)])
        return []

    def _fence_if_whole(self, now: float) -> Actions:
        tracker = self._tracker
        if (
            self.state is not PeerReadState.RECEIVING
            or tracker is None
            or self._num_announced is None
        ):
            return []
        return self._fence(now) if tracker.num_received >= self._num_announced else []

    def _fence(self, now: float) -> Actions:
        self.state = PeerReadState.FENCING
        self._end_s = now + self._config.fence_wait_s
        return [Fence()]

    def _over(self, actions: Actions) -> Actions:
        self.state = PeerReadState.OVER
        return actions
