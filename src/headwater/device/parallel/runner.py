"""The engine's runner over all ranks: rank 0 computes its part, samples, and leads the others.

submit ── STEP to every rank ──▶ each computes its part, in lockstep through the collectives
   └───── rank 0's own part ───▶ logits joined here ──▶ sampled here
"""

from headwater.device.open import LeadingRunner
from headwater.device.parallel.channel import RankMessage
from headwater.device.parallel.group import RankGroup
from headwater.device.parallel.messages import WarmPhase
from headwater.device.parallel.ranks import Ranks
from headwater.device.parallel.step_message import StepPacker
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.types import Tokens


class ParallelRunner:
    """The `Runner` of an engine with several ranks; owns them and their group."""

    layerwise = False  # a load would have to be awaited on every rank

    def __init__(self, own: LeadingRunner, ranks: Ranks, group: RankGroup) -> None:
        self._own = own
        self._ranks = ranks
        self._group = group
        self._packer = StepPacker()
        self.depth = own.depth
        own.announce = self._announce
        own.announce_warm = self._announce_warm

    def submit(self, batch: ScheduledBatch) -> None:
        """Let every rank compute the step."""
        try:
            self._own.submit(batch)
        except RuntimeError as exc:
            raise self._ranks.cause_of(exc) from exc

    def collect(self) -> StepResult:
        """The result of the oldest step in flight."""
        try:
            return self._own.collect()
        except RuntimeError as exc:
            raise self._ranks.cause_of(exc) from exc

    def close(self) -> None:
        """End the other ranks, then release this one's device."""
        self._ranks.close()
        self._group.close()
        self._own.close()

    def _announce(self, batch: ScheduledBatch, tokens: Tokens) -> None:
        """Send a step to the ranks just before it is computed here."""
        self._ranks.tell(RankMessage.STEP, self._packer.pack(batch, tokens))

    def _announce_warm(self, phase: WarmPhase) -> None:
        self._ranks.tell(RankMessage.WARM, bytes([phase]))
