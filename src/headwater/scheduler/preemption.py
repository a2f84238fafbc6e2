"""Preemption: takes blocks from decoding sequences for those that need one now.

Only decoding sequences are preempted. Their full blocks, prompt and output, are committed, so a
preempted sequence resumes by an ordinary prefix match. The request object is never changed.
"""

from collections.abc import Iterable

from headwater.scheduler.blocks import BlockAllocator, GrowthEstimate
from headwater.scheduler.queues import SequenceTable
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.scheduler.stats import Totals


class Preemption:
    """Preempts sequences and puts them back into the waiting queue."""

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockAllocator,
        growth: GrowthEstimate,
        totals: Totals,
        *,
        save: bool,
    ) -> None:
        """`save` is whether the blocks of a preempted sequence are offloaded."""
        self._table = table
        self._blocks = blocks
        self._growth = growth
        self._totals = totals
        self._save = save

    def make_room(self, in_need: Iterable[Sequence], now: float) -> None:
        """Give each of `in_need` one block, and preempt victims until there are enough.

        Stops early where the step in flight will free slots when it is collected: preempting
        for those would be premature. A sequence in need may be the victim itself.
        """
        for sequence in in_need:
            while sequence.state is SequenceState.DECODE:
                if self._blocks.grow((sequence,), now):
                    break
                if self._table.will_free_slots:
                    return
                self._preempt(self._table.choose_victim(), now)

    def release(self, victim: Sequence, now: float) -> None:
        """Commit its full blocks, release all, and queue it to resume."""
        if victim.num_computed >= victim.commit_at:
            self._blocks.commit(victim, now)
        if self._save:
            self._blocks.save(victim)
        self._blocks.release(victim, now)
        victim.load = None
        victim.num_preemptions += 1
        victim.preempted_s = now
        self._table.move(victim, SequenceState.WAITING)
        self._totals.num_preemptions += 1
        self._growth.raise_caution()

    def _preempt(self, victim: Sequence, now: float) -> None:
        """Stop scheduling `victim`. With a step in flight, its blocks are released when that
        step is collected, so that the token being sampled is neither lost nor sampled twice."""
        if victim.num_in_flight:
            self._table.move(victim, SequenceState.PREEMPTING)
        else:
            self.release(victim, now)
