"""Where every sequence is: waiting in order, running, or finished with its slots still in use."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, islice

from headwater.errors import RequestError
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.decode_rows import DecodeRows
from headwater.scheduler.request import Request, length_end
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId

_Key = tuple[int, bool, int]


class WaitingQueue:
    """Sequences by priority class; within a class, preempted ones first, then by arrival.

    A preempted sequence keeps its arrival, so among preempted ones the oldest is first. Removing
    from the front and adding at the end cost the same however many sequences wait.
    """

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._sequences: list[Sequence | None] = []
        """Sorted by key. The first `_head` entries of both lists are already removed."""
        self._head = 0
        self.num_preempted = 0
        self.version = 0
        """Changes whenever a sequence is added or removed."""

    def __len__(self) -> int:
        return len(self._keys) - self._head

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences in order. During iteration only the sequence returned last may be
        removed."""
        place = 0
        while place < len(self):
            sequence = self._sequences[self._head + place]
            if sequence is not None:
                yield sequence
            if place < len(self) and self._sequences[self._head + place] is sequence:
                place += 1

    def preempted(self) -> Iterator[Sequence]:
        """Preempted sequences in order; stops after the last of them. The sequence returned last
        may be removed meanwhile."""
        found = (sequence for sequence in self if sequence.num_preemptions)
        return islice(found, self.num_preempted)

    def push(self, sequence: Sequence) -> None:
        """Insert `sequence` by class, preemption and arrival."""
        key = _key(sequence)
        at = bisect_left(self._keys, key, lo=self._head)
        self._keys.insert(at, key)
        self._sequences.insert(at, sequence)
        self.version += 1
        self.num_preempted += sequence.num_preemptions > 0

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which must be in the queue."""
        head = self._head
        at = bisect_left(self._keys, _key(sequence), lo=head)
        if at == len(self._keys) or self._sequences[at] is not sequence:
            raise ValueError(f"{sequence.request_id} is not in the waiting queue")
        # Move the few entries before it, not the many after it.
        self._keys[head + 1 : at + 1] = self._keys[head:at]
        self._sequences[head + 1 : at + 1] = self._sequences[head:at]
        self._sequences[head] = None
        self._head += 1
        if 2 * self._head > len(self._keys):
            del self._keys[: self._head], self._sequences[: self._head]
            self._head = 0
        self.version += 1
        self.num_preempted -= sequence.num_preemptions > 0


def _only_decodes(sequence: Sequence) -> bool:
    """Whether each next step of a decoding sequence computes one token and samples one, and
    reports nothing else."""
    params = sequence.params
    return (
        sequence.usage is None
        and sequence.scores is None
        and params.logprobs is None
        and not params.grammar
    )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _key(sequence: Sequence) -> _Key:
    priority, arrival = sequence.rank
    return priority, sequence.num_preemptions == 0, arrival


class SequenceTable:
    """Keeps each sequence in the one list that its state names; only `move` changes state and
    list."""

    def __init__(self) -> None:
        self.alive: dict[RequestId, Sequence] = {}
        """Sequences that have not finished, by request id."""
        self.waiting = WaitingQueue()
        self.remote: list[Sequence] = []
        """Sequences computed by another instance that has not asked for room yet."""
        self.invited: dict[RequestId, Sequence] = {}
        """Waiting sequences whose prompt another instance computes, in the order of invitation."""
        self.receiving: list[Sequence] = []
        self.overlapping: list[Sequence] = []
        """Sequences whose first chunk is computed while the KV it reads is being loaded."""
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.rows = DecodeRows()
        """The sequences of `decoding` that are handled together."""
        self.preempting: list[Sequence] = []
        self.departing: list[Sequence] = []
        """Finished sequences whose slots a step in flight or a hand-off still uses."""
        self._num_arrived = 0
        self._admitted: dict[RequestId, Sequence] = {}
        self._computed: dict[RequestId, Sequence] = {}
        self._running = {
            SequenceState.REMOTE: self.remote,
            SequenceState.RECEIVING: self.receiving,
            SequenceState.OVERLAPPING: self.overlapping,
            SequenceState.PREFILL: self.prefilling,
            SequenceState.DECODE: self.decoding,
            SequenceState.PREEMPTING: self.preempting,
        }

    @property
    def num_running(self) -> int:
        return self.num_computing + len(self.receiving) + len(self.overlapping)

    @property
    def num_computing(self) -> int:
        """Running sequences that are computed by steps of this instance."""
        return len(self.decoding) + len(self.prefilling) + len(self.preempting)

    @property
    def will_free_slots(self) -> bool:
        """Whether collecting the step in flight will free slots."""
        return (
            bool(self.preempting)
            or any(s.num_in_flight for s in self.departing)
            or any(s.is_last_token_due for s in self.decoding)
        )

    def running(self) -> Iterator[Sequence]:
        """Sequences that have slots and have not finished."""
        return chain(
            self.decoding, self.prefilling, self.preempting, self.receiving, self.overlapping
        )

    def note_admitted(self, sequence: Sequence) -> None:
        """Record that `sequence` got its blocks, and that the KV of its cached prefix is in
        them, if the sequence belongs to a hand-off."""
        if sequence.receives or sequence.num_pins:
            self._admitted[sequence.request_id] = sequence
        self.note_computed(sequence)

    def note_computed(self, sequence: Sequence) -> None:
        """Record that more KV of `sequence` is in its blocks, if a hand-off reads them."""
        if sequence.num_pins:
            self._computed[sequence.request_id] = sequence

    def take_admitted(self) -> list[Sequence]:
        """Sequences of hand-offs that were admitted since the last call, each once."""
        admitted, self._admitted = self._admitted, {}
        return list(admitted.values())

    def take_computed(self) -> list[Sequence]:
        """Sequences of hand-offs with more KV than at the last call, each once."""
        computed, self._computed = self._computed, {}
        return list(computed.values())

    def single_decodes(self) -> list[Sequence]:
        """Decoding sequences that are handled one by one. Those that can be handled together
        get a row first, if there are enough of them."""
        if len(self.rows.sequences) == len(self.decoding):
            return []
        singles = [sequence for sequence in self.decoding if not sequence.has_row]
        if len(self.decoding) < self.rows.min_sequences:
            return singles
        plain = [sequence for sequence in singles if _only_decodes(sequence)]
        if plain:
            self.rows.add(plain)
            singles = [sequence for sequence in singles if not sequence.has_row]
        return singles

    def leave_rows(self, sequence: Sequence) -> None:
        """Take `sequence` out of the decode rows; from now on it is handled on its own."""
        if sequence.has_row:
            self.rows.remove(sequence)

    def with_slots(self) -> list[Sequence]:
        """Sequences that have slots, finished ones included."""
        return [*self.running(), *self.departing]

    def choose_victim(self) -> Sequence:
        """The decoding sequence to preempt; there must be one.

        It is the lowest in priority, and of those the newest; it may be the one that needs a
        block. A sequence in prefill is never a victim: it has all the blocks it asked for, and
        its work has no value before its first token. Arrival counts, not admission: a sequence
        that was preempted before keeps its age, so the oldest always gets through.
        """
        return max(self.decoding, key=_rank)

    def add(
        self, request: Request, config: SchedulerConfig, block_tokens: int, max_model_len: int
    ) -> Sequence:
        """Make a sequence of `request` and queue it; RequestError if it can never be served."""
        if request.request_id in self.alive:
            raise RequestError(
                f"a request with the id {request.request_id!r} is already running; use another id"
            )
        end = length_end(request, max_model_len)
        stops = request.params.stop_token_ids
        if not request.params.ignore_eos or request.params.grammar:
            stops += config.eos_token_ids
        cacheable = end if config.output_caching else len(request.tokens)
        sequence = Sequence(
            request,
            rank=(request.priority if config.policy == "priority" else 0, self._num_arrived),
            block_tokens=block_tokens,
            num_tokens_end=end,
            max_committed=cacheable // block_tokens if config.prefix_caching else 0,
            stop_tokens=frozenset(stops),
        )
        self._num_arrived += 1
        self.enter(sequence)
        return sequence

    def enter(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.alive[sequence.request_id] = sequence
        self.waiting.push(sequence)

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Change the state of `sequence` and move it to the list of that state. FINISHED is
        final."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.invited.pop(sequence.request_id, None)
        else:
            self.leave_rows(sequence)
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
