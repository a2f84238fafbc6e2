"""Computing over a promotion that has not landed, for runners that wait for it layer by layer.

    step n      | promotion starts | layer 0 arrives, is computed | layer 1 …     the first chunk
    later       | promotion lands: the chunk counts | or fails: the chunk never was

The sequence has a lease on what the device had, the targets of the promotion in its block table,
and slots of its own behind them. It is given one chunk. Until the promotion has landed nothing of
that is emitted or committed and no further step has a row of it; its end is taken in only when
no step in flight reads the targets. A failure sends it back to wait, as if it had not begun.
"""

from typing import TYPE_CHECKING

from headwater.cache import JobOutcome, Promotion
from headwater.types import JobId, Slots

if TYPE_CHECKING:
    from headwater.scheduler.batch import TokenLogprobs


class OverlappedLoad:
    """One promotion, and what was computed over it."""

    __slots__ = ("job", "logprobs", "num_tokens", "outcomes", "slots", "token")

    def __init__(self, promotion: Promotion) -> None:
        self.job: JobId = promotion.job
        self.slots: Slots = promotion.target_slots
        """They are the job's, and the cache's once it has landed; never the sequence's."""
        self.num_tokens = 0
        """Computed over it by its chunk, once that is collected."""
        self.token: int | None = None
        """Chosen by that chunk, and told to nobody."""
        self.logprobs: TokenLogprobs | None = None
        self.outcomes: list[JobOutcome] = []
        """Ends that came while a step in flight read the targets."""

    def hold(
        self, num_tokens: int, token: int | None, logprobs: "TokenLogprobs | None"
    ) -> None:
        """The chunk was collected."""
        self.num_tokens, self.token, self.logprobs = num_tokens, token, logprobs
