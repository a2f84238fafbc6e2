"""Who waits, and in what order."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from headwater.scheduler.sequence import Sequence

_Key = tuple[int, bool, int]


class WaitingQueue:
    """Sequences by priority class; within one, preempted ones first, then by arrival.

    A preempted sequence keeps its arrival, so among preempted ones the oldest is first. Leaving
    from the front and arriving at the end cost the same however many wait.
    """

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._sequences: list[Sequence | None] = []
        """In the order of the keys; the first `_head` of both have left."""
        self._head = 0
        self.num_preempted = 0
        self.version = 0
        """Another number whenever somebody came or went."""

    def __len__(self) -> int:
        return len(self._keys) - self._head

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Meanwhile the one that was just given may leave, and nobody else."""
        place = 0
        while place < len(self):
            sequence = self._sequences[self._head + place]
            if sequence is not None:
                yield sequence
            if place < len(self) and self._sequences[self._head + place] is sequence:
                place += 1

    def preempted(self) -> Iterator[Sequence]:
        """Those that were preempted, in order, and no look behind the last of them. The one that
        was just given may leave."""
        found = (sequence for sequence in self if sequence.num_preemptions)
        return islice(found, self.num_preempted)

    def push(self, sequence: Sequence) -> None:
        """Take the place that its class, its arrival and its preemptions give it."""
        key = _key(sequence)
        at = bisect_left(self._keys, key, lo=self._head)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)
        self.version += 1
        self.num_preempted += sequence.num_preemptions > 0

    def remove(self, sequence: Sequence) -> None:
        """Leave the queue; it must be there."""
        head = self._head
        at = bisect_left(self._keys, _key(sequence), lo=head)
        if at == len(self._keys) or self._sequences[at] is not sequence:
            raise ValueError(f"{sequence.request_id} does not wait")
        # The few before it move, and not the many behind it.
        self._keys[head + 1 : at + 1] = self._keys[head:at]
        self._sequences[head + 1 : at + 1] = self._sequences[head:at]
        self._sequences[head] = None
        self._head += 1
        if 2 * self._head > len(self._keys):
            del self._keys[: self._head], self._sequences[: self._head]
            self._head = 0
        self.version += 1
        self.num_preempted -= sequence.num_preemptions > 0


def _key(sequence: Sequence) -> _Key:
    priority, arrival = sequence.rank
    return priority, sequence.num_preemptions == 0, arrival
