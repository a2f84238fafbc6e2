"""Where every sequence is: waiting, running, or finished with a step still in flight."""

from collections.abc import Iterator
from itertools import chain

from headwater.scheduler.queue import WaitingQueue
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId


class Roster:
    """Each sequence in the one place that its state names; only `move` changes either."""

    def __init__(self) -> None:
        self.alive: dict[RequestId, Sequence] = {}
        """Those that have not finished, by name."""
        self.waiting = WaitingQueue()
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.decoding: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.departing: list[Sequence] = []
        """Finished, with a step in flight that may still write to their slots."""
        self._running = {
            SequenceState.PREFILL: self.prefilling,
            SequenceState.DECODE: self.decoding,
            SequenceState.LEAVING: self.leaving,
        }

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.leaving)

    def running(self) -> Iterator[Sequence]:
        """Those that have slots and have not finished."""
        return chain(self.decoding, self.prefilling, self.leaving)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence, which waits."""
        self.alive[sequence.request_id] = sequence
        self.waiting.push(sequence)

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change its state and its place. Finished is for ever."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            self._running[sequence.state].remove(sequence)
        sequence.state = state
        if state is SequenceState.WAITING:
            self.waiting.push(sequence)
        elif state is not SequenceState.FINISHED:
            self._running[state].append(sequence)
        else:
            del self.alive[sequence.request_id]
            if sequence.num_in_flight:
                self.departing.append(sequence)
