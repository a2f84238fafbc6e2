"""What a waiting sequence found below the device, and how far its loads got."""

from headwater.scheduler.price import LoadDecision, LowerTierMatch
from headwater.scheduler.usage import LoadUsage
from headwater.types import JobId, LoadPolicy

ANSWER_S = 0.002
"""So long after storage was asked, its answer is waited for before a sequence is looked at: most
answers are faster, and looking costs a match."""


class SequenceLoad:
    """One a sequence that has anything to load or to ask for; changed by `Loads` only."""

    __slots__ = (
        "asked_s",
        "began_s",
        "below",
        "choice",
        "device_blocks",
        "ended",
        "is_asking",
        "job",
        "num_jobs",
        "policy",
        "shortfall",
        "timeout_s",
        "until_s",
    )

    def __init__(self, policy: LoadPolicy, timeout_s: float) -> None:
        self.policy = policy
        self.timeout_s = timeout_s
        """Longest wait; not for the policy `wait`."""
        self.is_asking = False
        """Whether storage has not answered yet."""
        self.device_blocks = 0
        """Found on the device when the choice was made; `below` followed them."""
        self.below = LowerTierMatch()
        self.choice: LoadDecision | None = None
        self.job: JobId | None = None
        """The job it waits for, or waited for last; others may wait for the same."""
        self.num_jobs = 0
        """Started for this sequence."""
        self.began_s: float | None = None
        """When it began to wait: nothing but the load kept it from being admitted."""
        self.until_s: float | None = None
        """When it waits no longer."""
        self.asked_s: float | None = None
        """When its question was handed over."""
        self.ended: str | None = None
        """Why nothing more is loaded, whatever there is."""
        self.shortfall: str | None = None
        """Why less arrived than was wanted."""

    @property
    def end_s(self) -> float | None:
        """When its sequence is to be looked at although nothing has landed."""
        if self.until_s is None and self.is_asking and self.asked_s is not None:
            return self.asked_s + ANSWER_S
        return self.until_s

    def by_tier(self, num_blocks: int) -> tuple[int, int, int]:
        """Where the first `num_blocks` of the path were found: device, host, storage.

        Promoted blocks count for the tier they came from. What somebody else computed
        meanwhile was found on the device.
        """
        host_start = min(self.device_blocks, num_blocks)
        host = min(num_blocks - host_start, self.below.host)
        storage = min(num_blocks - host_start - host, self.below.storage)
        return num_blocks - host - storage, host, storage

    def usage(self, now: float) -> LoadUsage:
        """The choice and what came of it, for the ledger."""
        choice = self.choice
        return LoadUsage(
            choice="none" if choice is None else choice.reason,
            host_blocks=self.below.host,
            storage_blocks=self.below.storage,
            num_blocks=0 if choice is None else choice.num_blocks,
            load_s=None if choice is None else choice.load_s,
            recompute_s=None if choice is None else choice.recompute_s,
            chosen_s=None if choice is None else choice.chosen_s,
            waited_s=0.0 if self.began_s is None else now - self.began_s,
            shortfall=self.ended or self.shortfall,
        )
