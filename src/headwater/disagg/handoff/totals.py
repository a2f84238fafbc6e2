"""Counts of hand-offs by outcome, and the outcomes of recent hand-offs."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from headwater.disagg.protocol.messages import Reason

_REMEMBERED = 4096


@dataclass(slots=True)
class SideTotals:
    """Counts of one side since the instance started."""

    num_asks: int = 0
    """P: Ask messages sent. D: Ask messages that made it look for free blocks."""

    num_done: int = 0
    """Hand-offs that succeeded."""

    failures: Counter[str] = field(default_factory=Counter)
    """Hand-offs that failed, by reason."""

    num_bytes: int = 0
    """P: bytes pushed. D: bytes received in hand-offs that succeeded."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent by successful hand-offs, in total, by phase."""


class Ended:
    """Outcomes of the latest hand-offs, so that a late message gets the right answer."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[int, Reason | None] = OrderedDict()

    def note(self, handoff: int, outcome: Reason | None) -> None:
        """Note the outcome of `handoff`; None is success."""
        self._outcomes[handoff] = outcome
        if len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)

    def __contains__(self, handoff: int) -> bool:
        return handoff in self._outcomes

    def was_done(self, handoff: int) -> bool:
        """Whether the hand-off is remembered and succeeded."""
        return self._outcomes.get(handoff, Reason.GONE) is None
