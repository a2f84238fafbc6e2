"""Who gives way when a decoding sequence needs a block and none is left."""

from collections.abc import Iterable

from headwater.scheduler.sequence import Sequence


def choose_victim(decoding: Iterable[Sequence]) -> Sequence:
    """The lowest in priority, and of those the newest; it may be the one in need itself.

    `decoding` are the sequences that decode, never empty. A sequence that is still being
    prefilled is no victim: it has all the blocks it asked for, and its work is not yet worth
    anything to anyone. Arrival counts, not admission: a sequence that was preempted before
    is as old as it ever was, so the oldest always gets through.
    """
    return max(decoding, key=_rank)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
