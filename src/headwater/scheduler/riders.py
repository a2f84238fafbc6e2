"""Sequences that compute over a promotion before it has landed: what becomes of them."""

from collections.abc import Callable, Iterable
from itertools import chain

from headwater.cache import JobOutcome, JobStatus
from headwater.scheduler.batch import TokenLogprobs
from headwater.scheduler.holdings import BlockAllocator
from headwater.scheduler.intake import Admission
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.roster import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState

TakeIn = Callable[[Sequence, int, TokenLogprobs | None, float], SequenceOutput]
"""Takes in a token whose KV counts, and says what came of it."""


class OverlappedLoads:
    """Confirms or rewinds a riding sequence when its promotion has ended."""

    def __init__(
        self,
        roster: SequenceTable,
        holdings: BlockAllocator,
        intake: Admission,
        take_in: TakeIn,
    ) -> None:
        self._roster = roster
        self._holdings = holdings
        self._intake = intake
        self._take_in = take_in

    def postpones(self, outcome: JobOutcome) -> bool:
        """Whether a step in flight reads what this job moves: its end is kept for later."""
        sequence = self._find(outcome, chain(self._roster.riding, self._roster.departing))
        if sequence is None or sequence.ride is None or not sequence.num_in_flight:
            return False
        sequence.ride.outcomes.append(outcome)
        return True

    def collect(
        self,
        sequence: Sequence,
        num_tokens: int,
        token: int | None,
        chosen: TokenLogprobs | None,
    ) -> list[JobOutcome]:
        """The chunk was computed; the ends of its promotion that had to wait for that."""
        ride = sequence.ride
        assert ride is not None, "a riding sequence has a ride"
        sequence.num_in_flight -= 1
        ride.hold(num_tokens, token, chosen)
        return ride.outcomes

    def settle(self, outcome: JobOutcome, now: float) -> list[SequenceOutput]:
        """A job has landed in the cache. Whoever rode on it goes on, or starts over; the output
        that was held back until now, if there is one."""
        sequence = self._find(outcome, self._roster.riding)
        if sequence is None or sequence.ride is None:
            return []
        ride = sequence.ride
        if outcome.ending is not JobStatus.DONE or not self._holdings.confirm(sequence, now):
            self._holdings.release(sequence, now)
            self._roster.move(sequence, SequenceState.WAITING)
            return []
        is_first = not sequence.num_preemptions and not sequence.is_counted
        if is_first:
            match = self._holdings.match(sequence)
            self._intake.count(sequence, self._holdings.usage(sequence, match, now))
        sequence.is_counted = True
        sequence.num_computed += ride.num_tokens
        if ride.token is None:
            self._roster.move(sequence, SequenceState.PREFILL)
            if sequence.num_computed >= sequence.commit_at:
                self._holdings.commit(sequence, now)
            return []
        self._roster.move(sequence, SequenceState.DECODE)
        sequence.append(ride.token)
        return [self._take_in(sequence, ride.token, ride.logprobs, now)]

    def _find(self, outcome: JobOutcome, sequences: Iterable[Sequence]) -> Sequence | None:
        for sequence in sequences:
            if sequence.ride is not None and sequence.ride.job == outcome.job:
                return sequence
        return None
