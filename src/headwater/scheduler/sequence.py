"""The progress of one request: its tokens, its slots, and its steps in flight.

The request itself is never changed; its prompt cannot grow by its own output. Everything that
changes is here, and changes through the methods below.

    tokens     | prompt ................... | output ........ | being sampled
               0          num_computed        num_scheduled <= num_tokens
    KV         |<- written, step collected ->|<- in flight ->|
    blocks     |<- committed ->|<- held by this sequence ---->|  num_blocks
"""

from enum import Enum, auto
from math import inf

import numpy as np

from headwater.cache import Lease, Namespace, PathKeys, TokenPath
from headwater.scheduler.load_state import OverlappedLoad, SequenceLoad
from headwater.scheduler.request import Request, TokenLogprobs, Usage
from headwater.types import Slots, Tokens

_SPARE_TOKENS = 64
"""Room for output tokens in a new token buffer; the buffer doubles when it is full."""


class SequenceState(Enum):
    """The state of a sequence. All but WAITING, REMOTE and FINISHED are running states."""

    WAITING = auto()
    """In the waiting queue; has no slots and no lease."""

    REMOTE = auto()
    """Computed by another instance, which has not asked for room yet; has no slots."""

    RECEIVING = auto()
    """Has slots for its prompt, which another instance computes and sends."""

    OVERLAPPING = auto()
    """Its first chunk is computed while the KV it reads is being loaded; the chunk does not
    count before the load is done."""

    PREFILL = auto()
    """Has slots for all its tokens, and not all of them are scheduled yet."""

    DECODE = auto()
    """Samples one token per step."""

    PREEMPTING = auto()
    """Is being preempted; keeps its slots until its step in flight is collected."""

    FINISHED = auto()
    """Has its finish reason. Keeps its slots while a step in flight or a hand-off uses them."""


class Sequence:
    """One request in progress. Owned and changed by the scheduler only.

    A slotted class with plain counters, because the scheduler reads several of them for each
    running sequence in each step.
    """

    # fmt: off
    __slots__ = (
        "_block_buffer", "_block_tokens", "_buffer", "_keys", "_namespace", "arrays",
        "block_table", "column", "commit_at", "entered_at", "found_is_kept", "is_counted",
        "is_held", "last_token", "lease", "load", "max_committed", "max_computed", "min_stop",
        "num_blocks", "num_committed", "num_computed", "num_found", "num_in_flight",
        "num_passes", "num_pins", "num_preemptions", "num_scheduled", "num_tokens",
        "num_tokens_end", "overlap", "params", "preempted_s", "prefix_source",
        "prefix_wait_blocks", "prefix_wait_until_s", "prompt_tokens", "rank", "receives",
        "request", "request_id", "row", "schedulable_end", "scores", "state", "stop_tokens",
        "surplus", "usage", "waiter_place",
    )
    # fmt: on

    has_row = False
    """Whether it is a `RowSequence`, which alone uses `arrays` and `column`."""

    lease: Lease | None
    surplus: list[Slots]
    """Its own slots of blocks that another sequence committed first. This sequence reads its
    own slots until it ends."""

    overlap: OverlappedLoad | None
    """The load that its first chunk does not wait for; None when there is none."""

    block_table: Slots
    """Its slots in position order. A view that stays valid while batches are in flight."""

    num_blocks: int
    num_found: int
    """Leading tokens that were cached when it was admitted; 0 while it waits."""

    num_scheduled: int
    """Leading tokens whose KV is written or will be written by a step in flight."""

    num_computed: int
    """Leading tokens whose KV is written by collected steps, or was cached."""

    schedulable_end: int
    """Limit of `num_scheduled` without another block."""

    num_committed: int
    """Leading blocks that are committed, or equal to committed ones."""

    commit_at: int
    """When this many tokens are computed, there is a block to commit."""

    entered_at: int
    """Prompt tokens that the scheduler had given to steps when this sequence arrived."""

    num_passes: int
    """Later sequences that were admitted while this one was blocked."""

    preempted_s: float
    """When it was preempted last."""

    receives: bool
    """Whether another instance computes its prompt, so that it only needs slots."""

    is_counted: bool
    """Whether its prompt is counted in the hit statistics already."""

    found_is_kept: bool
    """Whether its cached blocks were marked as most recently used while it waited."""

    is_held: bool
    """Whether a step in flight continues from a token that was not sampled. Its result is
    discarded, and no further step has a row of the sequence until that step is collected."""

    row: int
    """Its row in the batch scheduled last, for `carry`."""

    num_pins: int
    """Hand-offs that read its blocks; they keep the blocks even when it has finished."""

    scores: list[TokenLogprobs] | None
    """Log-probabilities of its prompt tokens so far, from the second on; None if they were not
    requested, or were already reported."""

    prefix_source: "Sequence | None"
    """The running sequence whose blocks this one waits for."""

    waiter_place: tuple[int, bool, int] | None
    """Place of the most urgent sequence that waits for its blocks, in the order of prompts; None
    when none does."""

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
        """Priority class, then arrival: the queue order. Victims are taken from its end."""
        self.stop_tokens = stop_tokens
        self.prompt_tokens = len(request.tokens)
        self.num_tokens_end = num_tokens_end
        """With this many tokens it has reached its maximum length."""
        # A grammar alone says when an output is complete.
        min_tokens = 0 if request.params.grammar else request.params.min_tokens
        self.min_stop = self.answer_start + min_tokens
        """With fewer tokens than this, a stop token does not end the sequence."""
        self.max_computed = num_tokens_end - 1
        """KV is never needed for more tokens: the last token is sampled and not computed."""
        self.max_committed = max_committed
        """Maximum number of blocks that may be committed; fewer than all if output is not
        cached."""

        self._block_tokens = block_tokens
        self._namespace, self._keys = Namespace(request.cache_salt), PathKeys()
        spare = min(_SPARE_TOKENS, num_tokens_end - self.prompt_tokens)
        self._buffer: Tokens = np.empty(self.prompt_tokens + spare, dtype=np.int32)
        self._buffer[: self.prompt_tokens] = request.tokens
        self.num_tokens = self.prompt_tokens
        self.last_token = int(request.tokens[-1])

        self.state = SequenceState.WAITING
        self.num_preemptions = self.num_passes = self.entered_at = 0
        self.preempted_s = 0.0
        self.prefix_source = self.waiter_place = None
        self.prefix_wait_blocks = 0
        """It waits until `prefix_source` has committed this many blocks."""
        self.scores = None if request.params.prompt_logprobs is None else []
        self.prefix_wait_until_s = inf
        """Deadline of its wait for a prefix that a peer computes; infinite before that wait."""
        self.load: SequenceLoad | None = None
        """State of its load from lower tiers; None when there is nothing to load."""
        self.usage: Usage | None = None
        """Prompt usage for the first output; None before admission and after that output."""
        self.receives = self.is_counted = self.is_held = self.found_is_kept = False
        self.num_in_flight = self.num_pins = self.row = 0
        self._reset()

    @property
    def tokens(self) -> Tokens:
        """All tokens known: the prompt, then the output. A view."""
        return self.first_tokens(self.num_tokens)

    def first_tokens(self, count: int) -> Tokens:
        """Its first `count` tokens. A view."""
        return self._buffer[:count]

    @property
    def answer_start(self) -> int:
        """Number of tokens that the client sent. Resumed output tokens follow them, so they count
        as output."""
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
        """Whether a step in flight or a hand-off still uses its slots."""
        return self.num_in_flight > 0 or self.num_pins > 0

    @property
    def is_last_token_due(self) -> bool:
        """Whether the steps in flight will bring it to its maximum length."""
        return self.num_scheduled >= self.max_computed

    def path(self, num_tokens: int | None = None) -> TokenPath:
        """The cache path of its first `num_tokens` known tokens, by default of all. A view."""
        end = self.num_tokens if num_tokens is None else min(num_tokens, self.num_tokens)
        return TokenPath(self.first_tokens(end), self._namespace, keys=self._keys)

    def begin(
        self, lease: Lease | None, slots: Slots, overlap: OverlappedLoad | None = None
    ) -> None:
        """Start running. Its block table has the leased blocks, then those of an overlapped
        load, then `slots`."""
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
        """End the overlapped load, which succeeded; `lease` covers the loaded blocks too."""
        self.lease, self.overlap = lease, None
        self.num_found = self.num_computed = lease.num_blocks * self._block_tokens
        self.note_committed(lease.num_blocks)

    def extend(self, slots: Slots) -> None:
        """Append `slots` to its block table."""
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
        """Record that the first `num_blocks` blocks are committed, or equal to committed
        ones."""
        self.num_committed = num_blocks
        more = num_blocks < self.max_committed
        self.commit_at = (num_blocks + 1) * self._block_tokens if more else _NEVER

    def schedule(self, num_tokens: int, row: int) -> None:
        """Schedule `num_tokens` more tokens, in `row` of the step that is being scheduled."""
        self.num_scheduled += num_tokens
        self.num_in_flight += 1
        self.row = row

    def finish_chunk(self, num_tokens: int) -> None:
        """Count the `num_tokens` that a collected step computed."""
        self.num_in_flight -= 1
        self.num_computed += num_tokens

    def finish_chunk_with_token(self, num_tokens: int, token: int) -> None:
        """Like `finish_chunk`; the step also sampled `token`, whose KV is not written yet."""
        self.num_in_flight -= 1
        self.num_computed += num_tokens
        self.append(token)

    def finish_chunk_without_token(self, num_tokens: int) -> None:
        """Like `finish_chunk`; the step sampled no token, because the grammar mask was late.
        The last of the `num_tokens` is computed again and does not count until then."""
        self.num_in_flight -= 1
        self.num_scheduled -= 1
        self.num_computed += num_tokens - 1
        self.is_held = self.num_in_flight > 0

    def receive(self, token: int) -> None:
        """Append `token`, which a peer sampled after it had written the KV of the whole
        prompt."""
        self.receives = False
        self.num_scheduled = self.num_computed = self.num_tokens
        self.append(token)

    def fast_forward(self, tokens: Tokens, row: int) -> None:
        """Apply several steps at once. Each computed one token and sampled one of `tokens`."""
        self.num_scheduled += len(tokens)
        self.num_computed += len(tokens)
        self.row = row
        self.write_tokens(self.num_tokens, tokens)
        self.num_tokens += len(tokens)
        self.last_token = int(tokens[-1])

    def write_tokens(self, start: int, tokens: Tokens) -> None:
        """Write `tokens` to its buffer, from position `start` on."""
        end = start + len(tokens)
        while end > len(self._buffer):
            self._grow_buffer(start)
        self._buffer[start:end] = tokens

    def drop_blocks(self) -> Slots:
        """Drop its lease and block table. Returns the slots that only it had; the caller must
        free them."""
        held = self.held_slots()
        self._reset()
        return held

    def held_slots(self) -> Slots:
        """Slots that only this sequence has: of blocks that are not committed, and of blocks that
        another sequence committed first."""
        start = self.num_committed
        if self.overlap is not None:
            start += len(self.overlap.slots)
        return np.concatenate((self.block_table[start:], *self.surplus))

    def append(self, token: int) -> None:
        """Append a sampled token, whose KV is not written yet."""
        at = self.num_tokens
        if at == len(self._buffer):
            self._grow_buffer(at)
        self._buffer[at] = token
        self.num_tokens = at + 1
        self.last_token = token

    def _grow_buffer(self, num_tokens: int) -> None:
        """Double the token buffer. A new array, because batches in flight read the old one."""
        buffer = np.empty(min(2 * len(self._buffer), self.num_tokens_end), dtype=np.int32)
        buffer[:num_tokens] = self._buffer[:num_tokens]
        self._buffer = buffer

    def _reset(self) -> None:
        """Reset to no slots and nothing computed; the tokens stay."""
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
