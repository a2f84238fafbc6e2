"""Masks of allowed tokens for rows with a grammar. Threads compute them while a step runs.

The runner calls `begin` when it knows a step's rows, computes the step, and then takes the
masks that are ready. A row whose mask is late samples no token in that step and tries again in
a later one; no other row waits for it.

    begin      divide the rows among groups, one thread each; slow masks have other threads
    thread     portion by portion: consume the new tokens, then make the masks in one call
    take       the masks that are ready, even if later portions of their group are not

A mask state is only a cache. It is rebuilt from the output tokens whenever they do not continue
the tokens that it has consumed: after a preemption, a hand-off or a continuation from another
instance.
"""

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
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

_FURTHER_S = 0.0005
"""Time that each mask of a portion after the first may take. A mask at the beginning of a
string, which is common, walks the whole vocabulary: 0.35 ms for 128,000 tokens."""

_PORTION = 16
"""Masks that one call makes if there are several groups. The interpreter's lock is released once
per call. If it were released for each mask, several threads would wait for the lock longer than
the masks take. A single group makes one mask per call: it has no other thread to wait for, and
a call for several masks wakes a thread of the library, which takes 45 us."""

_MAX_GROUPS = 8
_CORES_PER_GROUP = 2

_GRACE_S = 0.002
"""Longest wait for masks when the step has ended and other rows wait."""

_ALONE_S = 0.020
"""Longest wait for a first mask when no row of the step could choose a token: about the longest
time of a mask within the limits of a grammar. The engine's loop is held during this wait, so new
requests and control operations wait too."""


def num_groups_for(num_cores: int) -> int:
    """How many threads make the masks of a step on a machine with this many cores."""
    return min(max(1, num_cores // _CORES_PER_GROUP), _MAX_GROUPS)


class MaskedRow(NamedTuple):
    """A row that samples with a grammar. The mask is for the token after `output` and
    `carried`."""

    row: int
    request_id: RequestId
    grammar: str
    output: Tokens
    """Output tokens that were known when the step was scheduled."""

    carried: int | None = None
    """The token after them, if the previous step sampled it."""

    def packed(self) -> bytes:
        """All output tokens so far, four bytes each. They are compared several times per step,
        and comparing bytes takes a tenth of the time."""
        known = self.output.tobytes()
        if self.carried is None:
            return known
        return known + self.carried.to_bytes(4, sys.byteorder, signed=True)


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

    __slots__ = ("error", "future", "grammar", "group", "is_busy", "is_slow", "made_for",
                 "matcher", "seen", "words")  # fmt: skip

    def __init__(self, grammar: str, group: int) -> None:
        self.grammar = grammar
        self.group = group
        self.matcher: LLMatcher | None = None
        self.seen = b""
        """Output tokens that the matcher has consumed, as `MaskedRow.packed`."""
        self.words: MaskWords | None = None
        """The mask, until it is taken."""
        self.made_for: bytes | None = None
        """`words` are the mask after these output tokens. A worker writes this value last, so
        the mask of a state can be read while other masks of its group are still being made."""
        self.error: str | None = None
        self.is_slow = False
        """Its last mask took too long for a group."""
        self.is_busy = False
        self.future: Future[None] | None = None
        """The call that makes its mask; a group has one for all its states."""

    def is_for(self, output: bytes) -> bool:
        """Whether its words are the mask after `output`."""
        return self.made_for == output


class MaskTask(NamedTuple):
    """The mask to make for one row of a step."""

    row: int
    state: MaskState
    output: bytes


class MaskWorkers:
    """Owns the states and the threads. One thread calls `begin` and `PendingMasks.take`."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        clock: Clock,
        *,
        max_states: int,
        num_threads: int = 2,
        num_groups: int = 1,
    ) -> None:
        """`num_threads` threads make the slow masks."""
        self._compiler = compiler
        self._clock = clock
        self._max_states = max_states
        self._num_words = -(-compiler.vocab_size // 32)
        self._states: OrderedDict[RequestId, MaskState] = OrderedDict()
        self._num_created = 0
        self._portion = 1 if num_groups == 1 else _PORTION
        self._groups = [
            ThreadPoolExecutor(1, thread_name_prefix=f"masks-{group}")
            for group in range(num_groups)
        ]
        self._executors: dict[int, LLExecutor] = {}
        """The library's thread of each group; the thread of the group starts it."""
        self._alone = ThreadPoolExecutor(num_threads, thread_name_prefix="slow-masks")

    @property
    def num_states(self) -> int:
        return len(self._states)

    def begin(self, rows: Sequence[MaskedRow]) -> "PendingMasks":
        """Start to make the masks of `rows`."""
        groups: list[list[MaskTask]] = [[] for _ in self._groups]
        apart: list[MaskTask] = []
        begun: set[Future[None]] = set()
        for row in rows:
            task = MaskTask(row.row, self._state(row), row.packed())
            state = task.state
            # A mask that was late in an earlier step may be ready now and is not made again.
            # Otherwise a group that always takes longer than a step waits for masks would never
            # be in time.
            if state.is_busy or state.is_for(task.output) or self._is_long(task):
                begun |= self._begin_alone(task)
                apart.append(task)
            else:
                groups[state.group].append(task)
        together = [task for tasks in groups for task in tasks]
        # Not cleared: a mask is read only when all its words are written.
        words = np.empty((len(together), self._num_words), dtype=np.int32)
        end = 0
        for group, tasks in enumerate(groups):
            start, end = end, end + len(tasks)
            if tasks:
                self._begin_group(group, tasks, words[start:end])
        return PendingMasks(together, apart, words, begun)

    def close(self) -> None:
        """End the threads. Calling it twice is safe."""
        for threads in (*self._groups, self._alone):
            threads.shutdown(wait=False, cancel_futures=True)

    def _state(self, row: MaskedRow) -> MaskState:
        state = self._states.get(row.request_id)
        if state is None or state.grammar != row.grammar:
            group = self._num_created % len(self._groups)
            self._num_created += 1
            state = self._states[row.request_id] = MaskState(row.grammar, group)
        self._states.move_to_end(row.request_id)
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
        return state

    def _is_long(self, task: MaskTask) -> bool:
        """Whether a mask takes more than consuming a few tokens, so that it is not made in a
        group."""
        state = task.state
        if state.is_slow or state.error is not None:
            return True
        if state.matcher is None:
            return bool(task.output) or not self._compiler.has(state.grammar, state.group)
        return not task.output.startswith(state.seen)

    def _begin_group(self, group: int, tasks: Sequence[MaskTask], words: MaskWords) -> None:
        for task in tasks:
            task.state.is_busy = True
        future = self._groups[group].submit(self._make_group, group, tasks, words)
        for task in tasks:
            task.state.future = future

    def _begin_alone(self, task: MaskTask) -> set[Future[None]]:
        """Start to make one mask and return its future, unless the mask exists, failed or is
        being made."""
        state = task.state
        if state.is_busy or state.error is not None or state.is_for(task.output):
            return set()
        state.is_busy = True
        words = np.empty((1, self._num_words), dtype=np.int32)
        state.future = self._alone.submit(self._make, [task], words, None)
        return {state.future}

    def _make_group(self, group: int, tasks: Sequence[MaskTask], words: MaskWords) -> None:
        """Runs on the thread of a group: make the masks, one portion after another."""
        executor = self._executors.get(group)
        if executor is None and self._portion > 1:
            executor = self._executors[group] = LLExecutor(num_threads=1)
        for start in range(0, len(tasks), self._portion):
            end = start + self._portion
            self._make(tasks[start:end], words[start:end], executor)

    def _make(
        self, tasks: Sequence[MaskTask], words: MaskWords, executor: LLExecutor | None
    ) -> None:
        """Runs on a thread: compile or rebuild if necessary, consume the new tokens, and write
        the masks to `words`. Several tasks need an `executor`."""
        began = self._clock.now()
        is_known = all(task.state.matcher is not None for task in tasks)
        for task in tasks:
            task.state.made_for = None
            self._try(task.state, self._consume, task)
        if not is_known:  # the time of compiling says nothing about the next mask
            began = self._clock.now()
        if len(tasks) == 1 or executor is None or not self._compute(tasks, words, executor):
            for task, own in zip(tasks, words, strict=True):
                self._try(task.state, _compute_one, task.state, own)
        allowed_s = _SLOW_S + _FURTHER_S * (len(tasks) - 1)
        is_slow = self._clock.now() - began > allowed_s
        for task, own in zip(tasks, words, strict=True):
            state = task.state
            state.is_slow, state.words = is_slow, own
            if state.error is None:
                state.made_for = task.output
            # Last: from here on the loop may begin another mask. If it did so before `made_for`
            # is written, the value written here would seem to belong to that other mask.
            state.is_busy = False

    def _consume(self, task: MaskTask) -> None:
        """Consume the output tokens of `task`; start from the beginning if necessary."""
        state, output = task.state, task.output
        if state.matcher is None or not output.startswith(state.seen):
            try:
                state.matcher = self._compiler.matcher(state.grammar, state.group)
            except RequestError as exc:
                state.error = str(exc)
                return
            state.seen = b""
        fresh = memoryview(output)[len(state.seen) :].cast("i").tolist()
        if fresh and not state.matcher.consume_tokens(fresh):
            state.error = f"the output does not fit its grammar: {state.matcher.get_error()}"
        state.seen = output

    def _compute(
        self, tasks: Sequence[MaskTask], words: MaskWords, executor: LLExecutor
    ) -> bool:
        """Make the masks of all `tasks` in one call. Returns False if the call failed."""
        made: list[tuple[LLMatcher, int]] = []
        for number, task in enumerate(tasks):
            matcher = task.state.matcher
            if matcher is not None and task.state.error is None:
                made.append((matcher, number))
        try:
            if made:
                executor.unsafe_compute_mask_ptr(
                    made, words.ctypes.data, self._num_words * 4, len(words)
                )
        except Exception:  # one by one, so that the failure ends one request alone
            log.exception("grammar masks could not be made together")
            return False
        for task in tasks:
            _note_error(task.state)
        return True

    def _try(self, state: MaskState, act: Callable[..., None], *arguments: object) -> None:
        try:
            act(*arguments)
        except Exception as exc:  # a thread boundary: the request ends with the reason
            log.exception("a grammar mask could not be made")
            state.error = f"the mask could not be made: {exc}"


class PendingMasks:
    """Masks that are being made for one step."""

    def __init__(
        self,
        together: Sequence[MaskTask],
        apart: Sequence[MaskTask],
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
        groups = {task.state.future for task in self._together if task.state.future is not None}
        wait(groups | self._begun, timeout=grace_s)
        if is_alone:
            # Every state of a group was fast before, so most masks are about to be ready. A row
            # that is left out loses a step.
            wait(groups, timeout=grace_s)
            self._await_first()
        return self._ready()

    def _await_first(self) -> None:
        """Wait for masks unless some row can choose a token, or has failed."""
        states = [task.state for task in (*self._together, *self._apart)]
        if all(state.is_busy for state in states):
            futures = {state.future for state in states if state.future is not None}
            wait(futures, timeout=_ALONE_S, return_when=FIRST_COMPLETED)

    def _ready(self) -> StepMasks:
        found = StepMasks(words=self._words)
        pieces: list[MaskWords] = []
        for row, state, output in (*self._together, *self._apart):
            if not state.is_busy and state.error is not None:
                found.failed[row] = state.error
            elif state.words is None or not state.is_for(output):
                found.late.append(row)
            else:
                found.rows.append(row)
                pieces.append(state.words)
                if not state.is_busy:
                    # The words are part of the masks of a whole step, so keeping those of each
                    # request that ended could take hundreds of megabytes.
                    state.words = state.made_for = None
        if len(pieces) != len(self._words) or self._apart:
            shape = (len(pieces), self._words.shape[1])
            found.words = np.array(pieces, dtype=np.int32).reshape(shape)
        return found


def _compute_one(state: MaskState, words: MaskWords) -> None:
    """Make one mask, if its tokens were consumed."""
    if state.matcher is not None and state.error is None:
        state.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _note_error(state)


def _note_error(state: MaskState) -> None:
    matcher = state.matcher
    if state.error is None and matcher is not None and matcher.is_error():
        state.error = f"the grammar became too complex: {matcher.get_error()[:200]}"
