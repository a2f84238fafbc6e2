"""What one sequence loads from lower tiers: the priced decision and the state of the load.

The price is arithmetic over measured speeds. A prefix may also be split: its head is loaded and
its tail is recomputed, if the tail is in a slower tier or would arrive too late.

    found     | device |     host     |     storage     |  not cached …
    loaded              |<---- num_blocks ---->|
    computed                                   |<------ recompute ------
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from headwater.cache import Job, JobOutcome, LoadJob
from headwater.scheduler.request import LoadUsage, TokenLogprobs
from headwater.types import JobId, LinkRate, LoadPolicy, Slots

if TYPE_CHECKING:
    from headwater.scheduler.pacing import LoadForecast
    from headwater.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Rates that the engine loop measured recently. None means not measured yet."""

    prefill_tokens_s: float | None = None
    """Prompt tokens computed per second."""

    host: LinkRate | None = None
    """Speed of loads from host to device."""

    storage: LinkRate | None = None
    """Speed of loads from storage to host."""

    offload_blocks_s: float | None = None
    """Blocks per second from device to host, in the fastest job so far. On a CPU, the mean over
    small copies would mostly measure waiting threads."""


class LowerTierMatch(NamedTuple):
    """Cached blocks below the device, in position order: those on the host come first."""

    host: int = 0
    storage: int = 0

    @property
    def num_blocks(self) -> int:
        return self.host + self.storage


class QueueAhead(NamedTuple):
    """The other work at the time when a load is priced."""

    backlog_tokens: int = 0
    """Prompt tokens that are computed before any token of this sequence."""

    num_waiting: int = 0
    """Other waiting sequences."""

    num_loading: int = 0
    """The part of `num_waiting` that waits for a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDecision:
    """How many of the blocks below the device are loaded, with the expected times."""

    num_blocks: int
    """Leading blocks to load; 0 recomputes all of them."""

    reason: str
    load_s: float | None = None
    """Expected seconds until the loaded blocks are on the device (all blocks, if none is
    loaded); None if nothing was measured."""

    recompute_s: float | None = None
    """Expected seconds to compute all of them instead."""

    chosen_s: float | None = None
    """Expected seconds of this decision: load these blocks and compute the rest."""


def choose(
    found: LowerTierMatch,
    *,
    rates: MeasuredRates,
    queued: LowerTierMatch,
    block_tokens: int,
    max_wait_s: float,
    ahead: QueueAhead,
) -> LoadDecision:
    """The cheapest leading part to load. `queued` are blocks that the links transfer first.

    A load costs nothing while the prompts `ahead` are computed, because this sequence computes
    only after them. Each second that this sequence computes also delays all waiting sequences,
    and each second of its load delays those that wait for a link. Without this rule, a burst of
    requests would compute what the link loads ten times faster. A load that takes longer than
    `max_wait_s` is never chosen. A link that was never measured is used, because only a load
    can measure it.
    """
    total = found.num_blocks
    compute_s = None
    if rates.prefill_tokens_s:
        compute_s = block_tokens / rates.prefill_tokens_s
    if compute_s is None:
        return LoadDecision(num_blocks=total, reason="unmeasured")
    backlog_s = ahead.backlog_tokens * compute_s / block_tokens
    costs = {}
    longest_s = max_wait_s + backlog_s
    for count in sorted({0, found.host, total, _within(longest_s, found, rates, queued)}):
        wait_s = load_s(count, found, rates, queued)
        if wait_s - backlog_s <= max_wait_s:
            rest_s = (total - count) * compute_s
            link_s = _link_s(count, found, rates)
            others_s = ahead.num_waiting * rest_s + ahead.num_loading * link_s
            costs[count] = max(wait_s, backlog_s) + rest_s + others_s
    best = min(costs, key=lambda count: (costs[count], -count))
    reason = "recompute_cheaper" if best == 0 else "load_cheaper" if best == total else "split"
    return LoadDecision(
        num_blocks=best,
        reason=reason,
        load_s=load_s(best or total, found, rates, queued),
        recompute_s=backlog_s + total * compute_s,
        chosen_s=max(load_s(best, found, rates, queued), backlog_s)
        + (total - best) * compute_s,
    )


def load_s(
    count: int, found: LowerTierMatch, rates: MeasuredRates, queued: LowerTierMatch
) -> float:
    """Expected seconds until the first `count` blocks below the device are on it.

    Blocks in storage are read to the host first; then all blocks are copied to the device. A
    link that was never measured costs nothing here.
    """
    if not count:
        return 0.0
    seconds = 0.0
    stored = count - found.host
    if stored > 0 and rates.storage is not None:
        seconds += rates.storage.job_s(stored, queued.storage)
    if rates.host is not None:
        seconds += rates.host.job_s(count, queued.host)
    return seconds


def _link_s(count: int, found: LowerTierMatch, rates: MeasuredRates) -> float:
    """Seconds for which the first `count` blocks below the device occupy the slowest link."""
    stored_s = 0.0
    if rates.storage is not None:
        _, block_s, num_parallel = rates.storage
        stored_s = max(count - found.host, 0) * block_s / num_parallel
    host_s = 0.0 if rates.host is None else count * rates.host.block_s
    return max(stored_s, host_s)


def _within(
    max_wait_s: float, found: LowerTierMatch, rates: MeasuredRates, queued: LowerTierMatch
) -> int:
    """The most blocks that can be on the device within `max_wait_s`."""
    least, most = 0, found.num_blocks
    while least < most:
        middle = (least + most + 1) // 2
        if load_s(middle, found, rates, queued) <= max_wait_s:
            least = middle
        else:
            most = middle - 1
    return least


ANSWER_S = 0.002
"""How long a sequence waits for storage's answer before it is examined. Most answers are
faster, and examining a sequence costs a match."""


class SequenceLoad:
    """State of a sequence that loads from a lower tier or waits for a lookup. Changed by
    `KVLoader`."""

    __slots__ = (
        "asked_s",
        "began_s",
        "below",
        "choice",
        "device_blocks",
        "ended",
        "is_asking",
        "job",
        "needs_answer",
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
        self.needs_answer = False
        """Whether the sequence waits for that answer."""
        self.device_blocks = 0
        """Blocks found on the device when the decision was made; `below` follow them."""
        self.below = LowerTierMatch()
        self.choice: LoadDecision | None = None
        self.job: LoadJob | None = None
        """The load in flight that it waits for. Other sequences may wait for the same load."""
        self.num_jobs = 0
        """Loads started for this sequence."""
        self.began_s: float | None = None
        """When it began to wait for the load. From then on only the load delayed its
        admission."""
        self.until_s: float | None = None
        """When it stops waiting."""
        self.asked_s: float | None = None
        """When its lookup was sent."""
        self.ended: str | None = None
        """Why no more is loaded, whatever the lower tiers have."""
        self.shortfall: str | None = None
        """Why fewer blocks arrived than were chosen."""

    @property
    def end_s(self) -> float | None:
        """When its sequence is examined again although its load has not ended."""
        if self.until_s is None and self.is_asking and self.asked_s is not None:
            return self.asked_s + ANSWER_S
        return self.until_s

    def by_tier(self, num_blocks: int) -> tuple[int, int, int]:
        """Where the first `num_blocks` of the path were found: device, host, storage.

        Loaded blocks count for the tier that they came from. Blocks that another request
        computed meanwhile count for the device.
        """
        host_start = min(self.device_blocks, num_blocks)
        host = min(num_blocks - host_start, self.below.host)
        storage = min(num_blocks - host_start - host, self.below.storage)
        return num_blocks - host - storage, host, storage

    def usage(self, now: float) -> LoadUsage:
        """The decision and its result, for the request's usage."""
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


class PendingLoad:
    """A load in flight, as the owner of the transfer job, and the sequences that depend on
    it."""

    __slots__ = ("_finish", "forecast", "has_ended", "overlapped", "waiting")

    def __init__(
        self, finish: "Callable[[PendingLoad, LoadJob, JobOutcome, float], None]"
    ) -> None:
        self._finish = finish
        self.waiting: list[Sequence] = []
        """Sequences that wait for the load."""
        self.overlapped: Sequence | None = None
        """The sequence that computes its first chunk during the load."""
        self.has_ended = False
        self.forecast: LoadForecast | None = None
        """How long it was expected to take, if that is known."""

    def finish_job(self, job: Job, outcome: JobOutcome, now: float) -> None:
        """Let the waiting sequences continue; the cache has applied the outcome. The second
        outcome of a timed-out load is ignored, because no sequence depends on it."""
        if not self.has_ended and isinstance(job, LoadJob):
            self.has_ended = True
            self._finish(self, job, outcome, now)


class OverlappedLoad:
    """One load in flight, and the chunk that was computed before the load ended."""

    __slots__ = ("load", "logprobs", "num_tokens", "token")

    def __init__(self, load: LoadJob) -> None:
        self.load = load
        self.num_tokens = 0
        """Tokens that the chunk computed; set when it is collected."""
        self.token: int | None = None
        """The token that the chunk sampled. It is not emitted before the load has ended."""
        self.logprobs: TokenLogprobs | None = None

    @property
    def job(self) -> JobId:
        """The number of the load."""
        return self.load.job

    @property
    def slots(self) -> Slots:
        """Target slots of the load. They belong to the job; when it has ended, they belong to
        the cache."""
        return self.load.target_slots

    def hold(self, num_tokens: int, token: int | None, logprobs: TokenLogprobs | None) -> None:
        """Keep the result of the collected chunk until the load has ended."""
        self.num_tokens, self.token, self.logprobs = num_tokens, token, logprobs
