"""Where every sequence is: waiting, running, or finished with its slots still in use."""

from collections.abc import Iterator
from itertools import chain

from headwater.scheduler.queue import WaitingQueue
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId


class SequenceTable:
    """Each sequence in the one place that its state names; only `move` changes either."""

    def __init__(self) -> None:
        self.alive: dict[RequestId, Sequence] = {}
        """Those that have not finished, by name."""
        self.waiting = WaitingQueue()
        self.remote: list[Sequence] = []
        """Those that wait for another instance, and for nothing here."""
        self.invited: dict[RequestId, Sequence] = {}
        """Waiting ones whose prompt somebody else computes, in the order of invitation."""
        self.receiving: list[Sequence] = []
        self.riding: list[Sequence] = []
        """They wait for a promotion that they have computed over, or are computing over."""
        self.prefilling: list[Sequence] = []
        """In the order of admission."""
        self.decoding: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.departing: list[Sequence] = []
        """Finished, with slots that a step in flight or somebody outside still uses."""
        self._running = {
            SequenceState.REMOTE: self.remote,
            SequenceState.RECEIVING: self.receiving,
            SequenceState.RIDING: self.riding,
            SequenceState.PREFILL: self.prefilling,
            SequenceState.DECODE: self.decoding,
            SequenceState.LEAVING: self.leaving,
        }

    @property
    def num_running(self) -> int:
        return self.num_computing + len(self.receiving) + len(self.riding)

    @property
    def num_computing(self) -> int:
        """Running ones that steps are for."""
        return len(self.decoding) + len(self.prefilling) + len(self.leaving)

    @property
    def gives_back(self) -> bool:
        """Whether the step in flight, once collected, gives slots back."""
        return (
            bool(self.leaving)
            or any(s.num_in_flight for s in self.departing)
            or any(s.is_last_token_due for s in self.decoding)
        )

    def running(self) -> Iterator[Sequence]:
        """Those that have slots and have not finished."""
        return chain(self.decoding, self.prefilling, self.leaving, self.receiving, self.riding)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence, which waits."""
        self.alive[sequence.request_id] = sequence
        self.waiting.push(sequence)

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change its state and its place. Finished is for ever."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.invited.pop(sequence.request_id, None)
        else:
            self._running[sequence.state].remove(sequence)
        sequence.state = state
        if state is SequenceState.WAITING:
            self.waiting.push(sequence)
        elif state is not SequenceState.FINISHED:
            self._running[state].append(sequence)
        else:
            del self.alive[sequence.request_id]
            if sequence.is_kept:
                self.departing.append(sequence)
