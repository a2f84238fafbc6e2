"""Masks of allowed tokens for rows with a grammar. Threads compute them while a step runs.

The runner calls `begin` when it knows a step's rows, computes the step, and then takes the
masks that are ready. A row whose mask is late samples no token in that step and tries again in
a later one; no other row waits for it.

A mask state is only a cache. It is rebuilt from the output tokens whenever they do not continue
the tokens that it has consumed: after a preemption, a hand-off or a continuation from another
instance.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from headwater.clock import Clock
from headwater.engine.grammar import GrammarCompiler
from headwater.errors import RequestError
from headwater.types import RequestId, Tokens

log = logging.getLogger(__name__)

MaskWords = NDArray[np.int32]
"""One bit per token, 32 in a word, lowest bit first."""

_SLOW_S = 0.003
"""A mask that takes longer is not made in the group from then on, but by the threads for slow
masks."""

_GRACE_S = 0.002
"""Longest wait for masks when the step has ended and other rows wait."""

_ALONE_S = 0.020
"""Longest wait for a first mask when no row of the step could choose a token: about the longest
time of a mask within the limits of a grammar. The engine's loop is held during this wait, so new
requests and control operations wait too."""


class MaskedRow(NamedTuple):
    """A row that samples with a grammar."""

    row: int
    request_id: RequestId
    grammar: str
    output: Tokens
    """Output tokens so far. The mask is for the next token."""


@dataclass(slots=True, kw_only=True)
class StepMasks:
    """The masks that are ready when tokens are sampled. Row numbers are those of
    `MaskedRow`."""

    rows: list[int] = field(default_factory=list)
    words: MaskWords
    """One row of words for each of `rows`."""

    late: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar exceeded its limits, with the reason."""


class MaskState:
    """The position of one request in its grammar. A worker owns it while `is_busy`."""

    __slots__ = ("error", "future", "grammar", "is_busy", "is_slow", "made_for", "matcher",
                 "seen", "words")  # fmt: skip

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.matcher: LLMatcher | None = None
        self.seen: Tokens | None = None
        """Output tokens that the matcher has consumed; None before the first mask."""
        self.words: MaskWords | None = None
        self.made_for: int | None = None
        """`words` are the mask after this many of `seen`. A worker writes it after `words`, so a
        state that has it can be read although the rest of its group is still being made."""
        self.error: str | None = None
        self.is_slow = True
        """True until a mask was fast once, because compilation may take long."""
        self.is_busy = False
        self.future: Future[None] | None = None
        """The call that makes its mask; a group has one for all its states."""

    def continues(self, output: Tokens) -> bool:
        """Whether `output` begins with the consumed tokens."""
        seen = self.seen
        if seen is None or seen is output:
            return seen is output
        # Takes a sixth of the time of `np.array_equal`, and runs three times for each row of a
        # step.
        return seen.tobytes() == output[: len(seen)].tobytes()

    def needs_own_thread(self, output: Tokens) -> bool:
        """Whether its mask takes more than consuming one token, so that it is not made in a
        group."""
        return self.is_busy or self.is_slow or not self.continues(output)

    def is_for(self, output: Tokens) -> bool:
        """Whether its words are the mask after `output`."""
        return self.made_for == len(output) and self.continues(output)


class MaskWorkers:
    """Owns the states and the threads. One thread calls `begin` and `PendingMasks.take`."""

    def __init__(
        self, compiler: GrammarCompiler, clock: Clock, *, max_states: int, num_threads: int = 2
    ) -> None:
        self._compiler = compiler
        self._clock = clock
        self._max_states = max_states
        self._num_words = -(-compiler.vocab_size // 32)
        self._states: OrderedDict[RequestId, MaskState] = OrderedDict()
        self._group = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._alone = ThreadPoolExecutor(num_threads, thread_name_prefix="slow-masks")

    @property
    def num_states(self) -> int:
        return len(self._states)

    def begin(self, rows: Sequence[MaskedRow]) -> "PendingMasks":
        """Start to make the masks of `rows`."""
        together: list[tuple[MaskedRow, MaskState]] = []
        apart: list[tuple[MaskedRow, MaskState]] = []
        begun: set[Future[None]] = set()
        for row in rows:
            state = self._state(row)
            # A mask that was late in an earlier step may be ready now and is not made again.
            # Otherwise a group that always takes longer than a step waits for masks would never
            # be in time.
            if state.needs_own_thread(row.output) or state.is_for(row.output):
                begun |= self._begin_alone(row, state)
                apart.append((row, state))
            else:
                together.append((row, state))
        words = np.zeros((len(together), self._num_words), dtype=np.int32)
        if together:
            for _, state in together:
                state.is_busy = True
            group = self._group.submit(self._make_group, together, words)
            for _, state in together:
                state.future = group
        return PendingMasks(together, apart, words, begun)

    def close(self) -> None:
        """End the threads. Calling it twice is safe."""
        for threads in (self._group, self._alone):
            threads.shutdown(wait=False, cancel_futures=True)

    def _state(self, row: MaskedRow) -> MaskState:
        state = self._states.get(row.request_id)
        if state is None or state.grammar != row.grammar:
            state = self._states[row.request_id] = MaskState(row.grammar)
        self._states.move_to_end(row.request_id)
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return state

    def _begin_alone(self, row: MaskedRow, state: MaskState) -> set[Future[None]]:
        """Start to make one mask and return its future, unless the mask exists, failed or is
        being made."""
        if state.is_busy or state.error is not None or state.is_for(row.output):
            return set()
        state.is_busy = True
        words = np.zeros(self._num_words, dtype=np.int32)
        state.future = self._alone.submit(self._make, row, state, words)
        return {state.future}

    def _make_group(
        self, rows: Sequence[tuple[MaskedRow, MaskState]], words: MaskWords
    ) -> None:
        """Runs on a thread: make the mask of each state, one after another. Matchers of one
        grammar share a lock in the library, so more threads would wait for each other."""
        for (row, state), own in zip(rows, words, strict=True):
            self._make(row, state, own)

    def _make(self, row: MaskedRow, state: MaskState, words: MaskWords) -> None:
        """Runs on a thread: compile or rebuild if necessary, consume the new tokens, and write
        the mask to `words`."""
        began = self._clock.now()
        is_new = state.matcher is None
        state.made_for = None
        try:
            self._consume(state, row.output)
            if state.matcher is not None and state.error is None:
                state.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                _note_error(state, state.matcher)
        except Exception as exc:  # a thread boundary: the request ends with the reason
            log.exception("a grammar mask could not be made")
            state.error = f"the mask could not be made: {exc}"
        state.is_slow = is_new or self._clock.now() - began > _SLOW_S
        state.words = words
        if state.error is None:
            state.made_for = len(row.output)
        # Last: from here on the loop may begin another mask. If it did so before `made_for` is
        # written, the value written here would seem to belong to that other mask.
        state.is_busy = False

    def _consume(self, state: MaskState, output: Tokens) -> None:
        """Consume `output` up to its end; start from the beginning if necessary."""
        if not state.continues(output):
            try:
                state.matcher = self._compiler.matcher(state.grammar)
            except RequestError as exc:
                state.error = str(exc)
                return
            state.seen = output[:0]
        assert state.matcher is not None, "the matcher is made before tokens are consumed"
        assert state.seen is not None, "`seen` is set together with the matcher"
        fresh = output[len(state.seen) :].tolist()
        if fresh and not state.matcher.consume_tokens(fresh):
            state.error = f"the output does not fit its grammar: {state.matcher.get_error()}"
        state.seen = output


class PendingMasks:
    """Masks that are being made for one step."""

    def __init__(
        self,
        together: Sequence[tuple[MaskedRow, MaskState]],
        apart: Sequence[tuple[MaskedRow, MaskState]],
        words: MaskWords,
        begun: set[Future[None]],
    ) -> None:
        """`words` hold the masks of the rows of `together`; the futures `begun` make masks of
        `apart`."""
        self._together = together
        self._apart = apart
        self._words = words
        self._begun = begun

    def take(self, *, is_alone: bool, grace_s: float = _GRACE_S) -> StepMasks:
        """The masks that are ready now or within `grace_s`. `is_alone` means that every row of
        the step has a grammar, so a longer wait, of `2 * grace_s + _ALONE_S` at most, delays no
        other row."""
        group = {state.future for _, state in self._together[:1] if state.future is not None}
        wait(group | self._begun, timeout=grace_s)
        if is_alone:
            # Every state of the group was fast before, so most masks are about to be ready.
            # A row that is left out loses a step.
            wait(group, timeout=grace_s)
            self._await_first()
        return self._ready()

    def _await_first(self) -> None:
        """Wait for masks unless some row can choose a token, or has failed."""
        states = [state for _, state in (*self._together, *self._apart)]
        if all(state.is_busy for state in states):
            futures = {state.future for state in states if state.future is not None}
            wait(futures, timeout=_ALONE_S, return_when=FIRST_COMPLETED)

    def _ready(self) -> StepMasks:
        found = StepMasks(words=self._words)
        pieces: list[MaskWords] = []
        for row, state in (*self._together, *self._apart):
            if not state.is_busy and state.error is not None:
                found.failed[row.row] = state.error
            elif state.words is None or not state.is_for(row.output):
                found.late.append(row.row)
            else:
                found.rows.append(row.row)
                pieces.append(state.words)
        if len(pieces) != len(self._words) or self._apart:
            shape = (len(pieces), self._words.shape[1])
            found.words = np.array(pieces, dtype=np.int32).reshape(shape)
        return found


def _note_error(state: MaskState, matcher: LLMatcher) -> None:
    if matcher.is_error():
        state.error = f"the grammar became too complex: {matcher.get_error()[:200]}"
