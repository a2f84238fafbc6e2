"""How much longer running sequences are expected to get, in blocks."""

from collections.abc import Iterable

from headwater.scheduler.sequence import Sequence

_FIRST_GUESS_TOKENS = 128.0
"""Expected output before any was observed; a request's own limit still bounds it."""

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

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._num_observed = 0
        self.mean_tokens = _FIRST_GUESS_TOKENS
        self.caution = 1.0

    def observe(self, num_output: int) -> None:
        """A sequence ended with `num_output` tokens."""
        self._num_observed += 1
        weight = max(1 / self._num_observed, _SHORTEST_MEMORY)
        self.mean_tokens += (num_output - self.mean_tokens) * weight

    def raise_caution(self) -> None:
        """A sequence had to be preempted: too little was left for growth."""
        self.caution = min(self.caution * _ALARM, _ALARMED)

    def lower_caution(self) -> None:
        """A step passed."""
        self.caution = max(self.caution * _CALMING, _CALM)

    def num_tokens(self, sequence: Sequence) -> int:
        """Tokens it is expected to add, never more than it may."""
        mean = self.mean_tokens
        expected = max(mean - sequence.num_output, mean * _OVERDUE) * self.caution
        return min(int(expected) + 1, sequence.num_tokens_end - sequence.num_tokens)

    def num_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `sequences` are expected to need beyond what they have or ask for."""
        blocks = 0
        block_tokens = self._block_tokens
        for sequence in sequences:
            end = sequence.num_tokens + self.num_tokens(sequence) - 1
            has = sequence.num_blocks or sequence.num_blocks_wanted
            blocks += max(-(-end // block_tokens) - has, 0)
        return blocks
