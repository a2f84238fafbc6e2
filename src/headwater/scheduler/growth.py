"""How much longer running sequences are expected to get, in blocks."""

from collections.abc import Iterable

from headwater.scheduler.sequence import Sequence

_SHORTEST_MEMORY = 1 / 64
"""Weight of one observed length once there are many; the first ones weigh more."""

_CALM, _ALARMED = 0.5, 4.0
"""Bounds of `caution`. Calm reserves half of what is expected: sequences do not all end at
once, and those that end first make room for the others."""

_ALARM, _CALMING = 2.0, 0.99
"""Factors on `caution`: for each preemption, and for each step without one."""

_OVERDUE = 0.25
"""A sequence that outlived the mean is expected to take this share of the mean again."""


class GrowthEstimate:
    """Expected remaining output of a sequence.

    Learned from the lengths of finished ones; multiplied by a caution that each preemption
    raises and each step lowers, so that admission backs off exactly when it was too eager.
    """

    def __init__(self, block_tokens: int, first_guess_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._num_observed = 0
        self.mean_tokens = float(first_guess_tokens)
        self.caution = 1.0

    def observe(self, num_output: int) -> None:
        """A sequence ended with `num_output` tokens."""
        self._num_observed += 1
        weight = max(1 / self._num_observed, _SHORTEST_MEMORY)
        self.mean_tokens += (num_output - self.mean_tokens) * weight

    def raise_caution(self) -> None:
        """A sequence had to be preempted: too little was left for growth."""
        self.caution = min(self.caution * _ALARM, _ALARMED)

    def lower_caution(self, num_steps: int = 1) -> None:
        """So many steps passed."""
        for _ in range(num_steps):
            if self.caution == _CALM:
                return
            self.caution = max(self.caution * _CALMING, _CALM)

    @property
    def is_calm(self) -> bool:
        """Whether caution is as low as it gets; until the next preemption it stays there, and
        what running sequences are expected to need does not fall before they get it."""
        return self.caution == _CALM

    def num_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `sequences` are expected to need beyond what they have or ask for.

        Never more than they may need. Written out in one loop, because it runs over all
        running sequences in every step that looks at the queue.
        """
        blocks = 0
        block_tokens = self._block_tokens
        mean = self.mean_tokens * self.caution
        least = mean * _OVERDUE
        for sequence in sequences:
            num_tokens = sequence.num_tokens
            left = mean - (num_tokens - sequence.prompt_tokens) * self.caution
            end = num_tokens + int(left if left > least else least)
            if end > sequence.max_computed:
                end = sequence.max_computed
            more = -(-end // block_tokens) - (sequence.num_blocks or sequence.num_blocks_wanted)
            if more > 0:
                blocks += more
        return blocks
