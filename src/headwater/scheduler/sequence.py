"""How far a request got: its tokens, its place in the pool, the steps it has in flight.

The request itself is never changed (its prompt cannot grow by its own output): everything
that changes is here, and changes through the methods below.

    tokens     | prompt ................... | output ........ | still being sampled
               0          num_computed        num_scheduled <= num_tokens
    KV         |<- written, step collected ->|<- in flight ->|
    blocks     |<- committed ->|<- held by this sequence ---->|  num_blocks
"""

from enum import Enum, auto

import numpy as np

from headwater.cache import Lease, Namespace, TokenPath
from headwater.scheduler.load_state import OverlappedLoad, SequenceLoad
from headwater.scheduler.output import Usage
from headwater.scheduler.request import Request
from headwater.types import Slots, Tokens

_SPARE_TOKENS = 64
"""Places for output that a token buffer starts with; it doubles when they are used."""


class SequenceState(Enum):
    """Where a sequence is in its life. A running one is in PREFILL, DECODE or PREEMPTING."""

    WAITING = auto()
    """In the queue; has no slots and no lease."""

    REMOTE = auto()
    """Computed by another instance, which has not asked for room yet; has no slots."""

    RECEIVING = auto()
    """Has slots for its prompt, which another instance computes and sends."""

    OVERLAPPING = auto()
    """Its first chunk is computed over a promotion that has not landed; nothing of it counts."""

    PREFILL = auto()
    """Has slots for all its tokens, and not all of them are given to a step yet."""

    DECODE = auto()
    """Chooses one token a step."""

    PREEMPTING = auto()
    """Was chosen as a victim; keeps its slots until its step in flight is collected."""

    FINISHED = auto()
    """Has its finish reason. Keeps its slots until its steps in flight are collected."""


class Sequence:
    """One request on its way. Owned and changed by the scheduler only.

    A slotted class with plain counters, because the scheduler reads a handful of them for
    each running sequence in each step.
    """

    __slots__ = (
        "_block_buffer",
        "_block_tokens",
        "_buffer",
        "_namespace",
        "block_table",
        "commit_at",
        "is_counted",
        "is_held",
        "last_token",
        "lease",
        "load",
        "max_committed",
        "max_computed",
        "min_stop",
        "num_blocks",
        "num_committed",
        "num_computed",
        "num_found",
        "num_in_flight",
        "num_passes",
        "num_pins",
        "num_preemptions",
        "num_scheduled",
        "num_tokens",
        "num_tokens_end",
        "overlap",
        "params",
        "prefix_source",
        "prefix_wait_blocks",
        "prefix_wait_until_s",
        "prompt_tokens",
        "rank",
        "receives",
        "request",
        "request_id",
        "row",
        "schedulable_end",
        "state",
        "stop_tokens",
        "surplus",
        "usage",
        "vacated_s",
    )

    lease: Lease | None
    surplus: list[Slots]
    """Its own slots of blocks that another sequence published first; read until the end."""

    overlap: OverlappedLoad | None
    """The promotion that it computes over before it has landed."""

    block_table: Slots
    """Its slots in position order; a view that stays true while batches are in flight."""

    num_blocks: int
    num_found: int
    """Leading tokens that were found when it was admitted; 0 while it waits."""

    num_scheduled: int
    """Leading tokens whose KV is written, or will be by a step in flight."""

    num_computed: int
    """Leading tokens whose KV is written by collected steps, or was found."""

    schedulable_end: int
    """`num_scheduled` cannot pass this without another block, or at all."""

    num_committed: int
    """Leading blocks that are published, or equal to published ones."""

    commit_at: int
    """With this many tokens computed there is a block to commit."""

    num_passes: int
    """Later sequences that were admitted while this one was blocked."""

    vacated_s: float
    """When it was preempted last."""

    receives: bool
    """Whether another instance computes its prompt, and it only needs room for it."""

    is_counted: bool
    """Whether its prompt was looked up before, and is in the ledger."""

    is_held: bool
    """Whether a step in flight continues from a token that was not chosen: its result is void,
    and no further step has a row of the sequence until it is collected."""

    row: int
    """Its row in the batch scheduled last, for `carry`."""

    num_pins: int
    """Readers outside the engine, which keep its blocks even when it has finished."""

    _block_buffer: Slots

    def __init__(
        self,
        request: Request,
        *,
        rank: tuple[int, int],
        block_tokens: int,
        num_tokens_end: int,
        max_committed: int,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.params = request.params
        self.rank = rank
        """Priority class, then arrival: the order of waiting; victims are taken from its end."""
        self.stop_tokens = stop_tokens
        self.prompt_tokens = len(request.tokens)
        self.num_tokens_end = num_tokens_end
        """With this many tokens it has reached its length."""
        # A grammar alone says when an output is complete.
        min_tokens = 0 if request.params.grammar else request.params.min_tokens
        self.min_stop = self.answer_start + min_tokens
        """With fewer tokens than this, a stop token does not end it."""
        self.max_computed = num_tokens_end - 1
        """KV is never needed for more: the last token is chosen, not computed."""
        self.max_committed = max_committed
        """Blocks that may be published at most; fewer than all where output is not cached."""

        self._block_tokens = block_tokens
        self._namespace = Namespace(request.cache_salt)
        spare = min(_SPARE_TOKENS, num_tokens_end - self.prompt_tokens)
        self._buffer: Tokens = np.empty(self.prompt_tokens + spare, dtype=np.int32)
        self._buffer[: self.prompt_tokens] = request.tokens
        self.num_tokens = self.prompt_tokens
        self.last_token = int(request.tokens[-1])

        self.state = SequenceState.WAITING
        self.num_preemptions = self.num_passes = 0
        self.vacated_s = 0.0
        self.prefix_source: Sequence | None = None
        """The running prefill whose blocks this one waits for."""
        self.prefix_wait_blocks = 0
        """It waits until its prefix_source has committed this many."""
        self.prefix_wait_until_s: float | None = None
        """Set by its first wait, and the end of all its waits."""
        self.load: SequenceLoad | None = None
        """What it found below the device while it waits; None when that is nothing."""
        self.usage: Usage | None = None
        """What the first output will report; None before admission and after that output."""
        self.receives = self.is_counted = self.is_held = False
        self.num_in_flight = self.num_pins = self.row = 0
        self._start_over()

    @property
    def tokens(self) -> Tokens:
        """All tokens known: the prompt, then the output. A view."""
        return self._buffer[: self.num_tokens]

    @property
    def answer_start(self) -> int:
        """Tokens before this are its client's; what was said of the answer elsewhere is not."""
        return self.prompt_tokens - self.request.num_resumed_tokens

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_tokens

    @property
    def num_blocks_wanted(self) -> int:
        """Blocks that hold every token known, the partial last one included."""
        return -(-self.num_tokens // self._block_tokens)

    @property
    def is_running(self) -> bool:
        return self.state in _RUNNING

    @property
    def is_kept(self) -> bool:
        """Whether a step in flight, or somebody outside, still uses its slots."""
        return self.num_in_flight > 0 or self.num_pins > 0

    @property
    def is_last_token_due(self) -> bool:
        """Whether the steps in flight will bring it to its length."""
        return self.num_scheduled >= self.max_computed

    def path(self, num_tokens: int | None = None) -> TokenPath:
        """The identity of its leading `num_tokens` known tokens, by default of all. A view."""
        end = self.num_tokens if num_tokens is None else min(num_tokens, self.num_tokens)
        return TokenPath(self._buffer[:end], self._namespace)

    def begin(
        self, lease: Lease | None, slots: Slots, overlap: OverlappedLoad | None = None
    ) -> None:
        """Start running: leased blocks first, then those of a ride, then `slots` to be filled."""
        num_leased = 0 if lease is None else lease.num_blocks
        self.lease = lease
        self.num_found = num_leased * self._block_tokens
        self.num_scheduled = self.num_computed = self.num_found
        if lease is not None:
            self.extend(lease.slots)
        if overlap is not None:
            self.overlap = overlap
            self.extend(overlap.slots)
            self.num_scheduled += len(overlap.slots) * self._block_tokens
        self.extend(slots)
        self.note_committed(num_leased)
        self.prefix_source = None

    def confirm(self, lease: Lease) -> None:
        """What it rode on has landed, and is leased with what it had."""
        self.lease, self.overlap = lease, None
        self.num_found = self.num_computed = lease.num_blocks * self._block_tokens
        self.note_committed(lease.num_blocks)

    def extend(self, slots: Slots) -> None:
        """Continue its block table with `slots`."""
        start, end = self.num_blocks, self.num_blocks + len(slots)
        if end > len(self._block_buffer):
            table = np.empty(max(end + 1, 2 * len(self._block_buffer)), dtype=np.int64)
            table[:start] = self.block_table
            self._block_buffer = table
        self._block_buffer[start:end] = slots
        self.num_blocks = end
        self.block_table = self._block_buffer[:end]
        self.schedulable_end = min(end * self._block_tokens, self.max_computed)

    def note_committed(self, num_blocks: int) -> None:
        """Its leading `num_blocks` are published, or equal to published ones."""
        self.num_committed = num_blocks
        more = num_blocks < self.max_committed
        self.commit_at = (num_blocks + 1) * self._block_tokens if more else _NEVER

    def give(self, num_tokens: int, row: int) -> None:
        """`num_tokens` more are computed by `row` of the step being scheduled."""
        self.num_scheduled += num_tokens
        self.num_in_flight += 1
        self.row = row

    def finish_chunk(self, num_tokens: int) -> None:
        """A step that computed `num_tokens` of it was collected."""
        self.num_in_flight -= 1
        self.num_computed += num_tokens

    def finish_chunk_with_token(self, num_tokens: int, token: int) -> None:
        """The same, and the step chose `token`, whose KV is not written."""
        self.num_in_flight -= 1
        self.num_computed += num_tokens
        self.append(token)

    def finish_chunk_without_token(self, num_tokens: int) -> None:
        """A step computed `num_tokens` of it and chose no token: its mask was late. The last of
        them is computed again, and until then does not count."""
        self.num_in_flight -= 1
        self.num_scheduled -= 1
        self.num_computed += num_tokens - 1
        self.is_held = self.num_in_flight > 0

    def receive(self, token: int) -> None:
        """All its prompt's KV was written from outside, and `token` was chosen there."""
        self.receives = False
        self.num_scheduled = self.num_computed = self.num_tokens
        self.append(token)

    def fast_forward(self, tokens: Tokens, row: int) -> None:
        """Steps that computed one token each, and chose `tokens`, were scheduled and collected."""
        count = len(tokens)
        self.num_scheduled += count
        self.num_computed += count
        self.row = row
        at, end = self.num_tokens, self.num_tokens + count
        while end > len(self._buffer):
            self._lengthen()
        self._buffer[at:end] = tokens
        self.num_tokens = end
        self.last_token = int(tokens[-1])

    def vacate(self) -> Slots:
        """Drop lease and table; the slots it alone held, which the caller must give back."""
        held = self.held_slots()
        self._start_over()
        return held

    def held_slots(self) -> Slots:
        """Slots only this sequence has: not committed, or equal to a block published before."""
        start = self.num_committed
        if self.overlap is not None:
            start += len(self.overlap.slots)
        return np.concatenate((self.block_table[start:], *self.surplus))

    def append(self, token: int) -> None:
        """`token` was chosen; its KV is not written."""
        at = self.num_tokens
        if at == len(self._buffer):
            self._lengthen()
        self._buffer[at] = token
        self.num_tokens = at + 1
        self.last_token = token

    def _lengthen(self) -> None:
        """Room for twice the tokens, in a new array: batches in flight read the old one."""
        at = self.num_tokens
        buffer = np.empty(min(2 * len(self._buffer), self.num_tokens_end), dtype=np.int32)
        buffer[:at] = self._buffer[:at]
        self._buffer = buffer

    def _start_over(self) -> None:
        """No slots, nothing computed; the tokens stay."""
        self.lease = None
        self.overlap = None
        self.surplus = []
        # A new array: batches in flight keep views of the old one.
        self._block_buffer = self.block_table = np.empty(0, dtype=np.int64)
        self.num_blocks = 0
        self.num_found = self.num_scheduled = self.num_computed = self.schedulable_end = 0
        self.num_committed = 0
        self.commit_at = _NEVER


_NEVER = 1 << 62
_RUNNING = frozenset(
    (
        SequenceState.RECEIVING,
        SequenceState.OVERLAPPING,
        SequenceState.PREFILL,
        SequenceState.DECODE,
        SequenceState.PREEMPTING,
    )
)
