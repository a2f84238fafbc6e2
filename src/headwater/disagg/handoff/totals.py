"""What became of hand-offs, counted; and the ones that ended lately, remembered."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from headwater.disagg.protocol.messages import Reason

_REMEMBERED = 4096


@dataclass(slots=True)
class SideTotals:
    """One side's counts since the instance started."""

    num_asks: int = 0
    """Asks that were sent (P), or led to a search for room (D)."""

    num_done: int = 0
    """Hand-offs that ended well."""

    failures: Counter[str] = field(default_factory=Counter)
    """Those that did not, by reason."""

    num_bytes: int = 0
    """Pushed (P), or landed and accounted for (D)."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Summed over hand-offs that ended well, by part."""


class Ended:
    """The outcomes of the last hand-offs, so that a late message gets the right answer."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[int, Reason | None] = OrderedDict()

    def note(self, handoff: int, outcome: Reason | None) -> None:
        """`handoff` is over; None is well."""
        self._outcomes[handoff] = outcome
        if len(self._outcomes) > _REMEMBERED:
            self._outcomes.popitem(last=False)

    def __contains__(self, handoff: int) -> bool:
        return handoff in self._outcomes

    def was_done(self, handoff: int) -> bool:
        """Whether it is remembered, and ended well."""
        return self._outcomes.get(handoff, Reason.GONE) is None
