"""Who waits, and in what order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headwater.scheduler.sequence import Sequence

_Key = tuple[int, bool, int]


class WaitingQueue:
    """Sequences by priority class; within one, preempted ones first, then by arrival.

    A preempted sequence keeps its arrival, so among preempted ones the oldest is first.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_preempted = 0
        self.version = 0
        """Another number whenever somebody came or went."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Take the place that its class, its arrival and its preemptions give it."""
        insort(self._sequences, sequence, key=_key)
        self.version += 1
        self.num_preempted += sequence.num_preemptions > 0

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue; it must be there."""
        at = bisect_left(self._sequences, _key(sequence), key=_key)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise ValueError(f"{sequence.request_id} does not wait")
        del self._sequences[at]
        self.version += 1
        self.num_preempted -= sequence.num_preemptions > 0


def _key(sequence: Sequence) -> _Key:
    priority, arrival = sequence.rank
    return priority, sequence.num_preemptions == 0, arrival
