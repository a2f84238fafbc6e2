"""Block allocation for sequences: the one place where their slots and leases change.

Nothing here decides whether or when a sequence gets blocks. `BlockAllocator` keeps sequence and
cache in agreement about which sequence has which block, and is the only place that commits a
sequence's blocks. `GrowthEstimate` predicts how many more blocks running sequences will need.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Listed

import numpy as np

from headwater.cache import FinishedRequest, Lease, LoadJob, Match, TieredCache
from headwater.errors import InvariantError
from headwater.scheduler.load_state import OverlappedLoad
from headwater.scheduler.request import Usage
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import Slots

_MIN_WEIGHT = 1 / 64
"""Weight of one observed length once there are many; the first ones weigh more."""

_MIN_CAUTION, _MAX_CAUTION = 0.5, 4.0
"""Bounds of `caution`. The lower bound reserves half of the expected growth: sequences do not
all end at once, and those that end first make room for the others."""

_RAISE_FACTOR, _LOWER_FACTOR = 2.0, 0.99
"""Factors applied to `caution` by each preemption, and by each step without one."""

_OVERDUE_SHARE = 0.25
"""A sequence longer than the mean is expected to grow by this share of the mean."""


class BlockAllocator:
    """Takes, commits and releases blocks on behalf of sequences.

    Without `prefix_caching` nothing is matched, leased or committed; a sequence only holds slots.
    """

    def __init__(self, cache: TieredCache, *, prefix_caching: bool) -> None:
        self._cache = cache
        self.block_tokens = cache.block_tokens
        self._prefix_caching = prefix_caching

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a match may find other blocks, or more or fewer blocks can be taken."""
        return self._cache.version, self._cache.num_available

    def match(self, sequence: Sequence) -> Match | None:
        """The cached prefix of the tokens of `sequence`; None without prefix caching.

        The last token is left out: it must be computed so that the next one can be sampled,
        unless another instance does that.
        """
        if not self._prefix_caching:
            return None
        end = sequence.num_tokens if sequence.receives else sequence.num_tokens - 1
        longest = end // self._cache.block_tokens
        if sequence.scores is not None:
            longest = 0  # log-probabilities of the prompt need all of it computed
        return self._cache.match(sequence.path(), max_blocks=longest)

    @property
    def num_cacheable(self) -> int:
        """Blocks that device and host have room for."""
        return self._cache.config.device_blocks + self._cache.config.host_blocks

    def keep_found(self, sequence: Sequence, now: float) -> None:
        """Mark the cached blocks of the waiting `sequence` as most recently used."""
        match = self.match(sequence)
        if match is not None:
            self._cache.refresh(match, now=now)

    def renew(self, sequence: Sequence, match: Match | None) -> Match | None:
        """`match`, or a new match if the tree has changed since."""
        if match is None or self._cache.is_current(match):
            return match
        return self.match(sequence)

    def available(self, match: Match | None) -> int:
        """Blocks that could be taken once `match` is leased."""
        return (
            self._cache.num_available if match is None else self._cache.available_beside(match)
        )

    def begin(self, sequence: Sequence, match: Match | None, now: float) -> bool:
        """Lease the cached blocks and take all others, or change nothing and return False."""
        if match is None:
            slots = self._cache.take(sequence.num_blocks_wanted, now=now)
            if slots is None:
                return False
            sequence.begin(None, slots)
            return True
        first = sequence.num_preemptions == 0 and not sequence.is_counted
        lease = self._cache.lease(match, owner=sequence.request_id, now=now, counted=first)
        slots = self._cache.take(sequence.num_blocks_wanted - lease.num_blocks, now=now)
        if slots is None:
            self._cache.release(lease, now=now)
            return False
        sequence.begin(lease, slots)
        self._announce(sequence, lease)
        return True

    def begin_overlapped(
        self, sequence: Sequence, match: Match, load: LoadJob, now: float
    ) -> bool:
        """Lease the blocks on the device, append the target slots of `load`, which loads the
        following blocks, and take all others; or change nothing and return False."""
        lease = self._cache.lease(match, owner=sequence.request_id, now=now, counted=False)
        found = lease.num_blocks + load.num_blocks
        slots = None
        if lease.num_blocks == match.device_blocks:
            slots = self._cache.take(sequence.num_blocks_wanted - found, now=now)
        if slots is None:
            self._cache.release(lease, now=now)
            return False
        sequence.begin(lease, slots, OverlappedLoad(load))
        return True

    def confirm(self, sequence: Sequence, now: float) -> bool:
        """Lease the loaded blocks that the first chunk of `sequence` has read. Returns False,
        with nothing changed, if the cache has other slots for them by now."""
        overlap, old = sequence.overlap, sequence.lease
        assert overlap is not None, "only a sequence with an overlapped load is confirmed"
        assert old is not None, "an overlapping sequence has a lease, possibly of no block"
        start, end = old.num_blocks, old.num_blocks + len(overlap.slots)
        match = self._cache.match(sequence.path(), max_blocks=end)
        slots = np.concatenate([node.device for node in match.nodes] or [overlap.slots])
        if match.device_blocks < end or not np.array_equal(slots[start:end], overlap.slots):
            return False
        first = sequence.num_preemptions == 0 and not sequence.is_counted
        lease = self._cache.lease(match, owner=sequence.request_id, now=now, counted=first)
        self._cache.release(old, now=now)
        sequence.confirm(lease)
        self._announce(sequence, lease)
        return True

    def grow(self, sequences: Listed[Sequence], now: float) -> bool:
        """Take one more block for each sequence, or change nothing and return False."""
        slots = self._cache.take(len(sequences), now=now)
        if slots is None:
            return False
        for at, sequence in enumerate(sequences):
            sequence.extend(slots[at : at + 1])
        return True

    def commit(self, sequence: Sequence, now: float) -> None:
        """Commit the blocks that collected steps have filled.

        Only tokens with written KV count, so the token sampled last is never included.
        """
        if sequence.lease is None:
            return
        block_tokens = self._cache.block_tokens
        end = min(sequence.num_computed // block_tokens, sequence.max_committed)
        # A copy: the tree keeps the array, and a view would keep the whole block table alive.
        slots = sequence.block_table[sequence.num_committed : end].copy()
        path = sequence.path(end * block_tokens)
        surplus = self._cache.commit(sequence.lease, path, slots, now=now)
        if len(surplus):
            sequence.surplus.append(surplus)
        sequence.note_committed(end)

    def commit_received(self, sequence: Sequence, num_received: int, now: float) -> None:
        """Commit the first `num_received` blocks after the lease of `sequence`; a peer has sent
        them completely."""
        end = (sequence.num_committed + num_received) * self._cache.block_tokens
        sequence.num_scheduled = sequence.num_computed = min(end, sequence.num_tokens)
        self.commit(sequence, now)

    def detach(self, sequence: Sequence, now: float) -> Slots:
        """Release the lease of `sequence` and return the slots it holds; they belong to the
        caller."""
        lease = sequence.lease
        held = sequence.drop_blocks()
        if lease is not None:
            self._cache.release(lease, now=now)
        return held

    def free(self, slots: Slots) -> None:
        """Free slots that were detached."""
        self._cache.free(slots)

    def release(self, sequence: Sequence, now: float) -> None:
        """Release the lease and the slots of `sequence`. No step in flight may use the
        slots."""
        lease = sequence.lease
        held = sequence.drop_blocks()
        if lease is not None:
            finished = None
            if sequence.state is SequenceState.FINISHED:
                request = sequence.request
                finished = FinishedRequest(
                    sequence.prompt_tokens,
                    sequence.num_output,
                    request.session_id,
                    request.cache_hint,
                )
            self._cache.release(lease, now=now, slots=held, finished=finished)
        elif len(held):
            self._cache.free(held)

    def save(self, sequence: Sequence) -> None:
        """Queue the committed blocks of `sequence` to be written to the host, if there is a
        host tier."""
        if sequence.lease is not None:
            self._cache.save(sequence.lease)

    def usage(self, sequence: Sequence, match: Match | None, now: float) -> Usage:
        """How much of the prompt of `sequence` was cached, and where. Called at its first
        admission."""
        found = sequence.num_computed
        block_tokens, load = self._cache.block_tokens, sequence.load
        tiers = (sequence.num_committed, 0, 0)
        if load is not None:
            tiers = load.by_tier(sequence.num_committed)
        names = zip(("device", "host", "storage"), tiers, strict=True)
        computed = sequence.prompt_tokens - found
        peer, computed = (computed, 0) if sequence.receives else (0, computed)
        return Usage(
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=found,
            by_tier={name: num * block_tokens for name, num in names} | {"peer": peer},
            computed=computed,
            miss_reason=_miss_reason(sequence, match),
            queued_s=max(now - sequence.request.arrival_s, 0.0),
            load=None if load is None else load.usage(now),
        )

    def _announce(self, sequence: Sequence, lease: Lease) -> None:
        publishable = sequence.path(sequence.max_committed * self._cache.block_tokens)
        self._cache.announce(lease, publishable)

    def check(self, sequences: Listed[Sequence], detached: Iterable[Slots]) -> None:
        """Raise InvariantError unless each held slot belongs to exactly one of `sequences`, or
        is one of `detached`."""
        parts = [*(sequence.held_slots() for sequence in sequences), *detached]
        ours = np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        theirs = self._cache.held_slots()
        if not np.array_equal(ours, theirs):
            raise InvariantError(
                f"held slots differ: sequences have {ours.tolist()}, the pool {theirs.tolist()}"
            )


class GrowthEstimate:
    """Expected remaining output of sequences, in blocks.

    Learned from the lengths of finished sequences, and multiplied by `caution`. A preemption
    raises the caution and each step lowers it, so that admission leaves more room after it
    admitted too many.
    """

    def __init__(self, block_tokens: int, first_guess_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._num_observed = 0
        self.mean_tokens = float(first_guess_tokens)
        self.caution = 1.0

    def observe(self, num_output: int) -> None:
        """Learn from a sequence that ended with `num_output` tokens."""
        self._num_observed += 1
        weight = max(1 / self._num_observed, _MIN_WEIGHT)
        self.mean_tokens += (num_output - self.mean_tokens) * weight

    def raise_caution(self) -> None:
        """Expect more growth, because a sequence was preempted for lack of room."""
        self.caution = min(self.caution * _RAISE_FACTOR, _MAX_CAUTION)

    def lower_caution(self, num_steps: int = 1) -> None:
        """Expect less growth after `num_steps` steps without a preemption."""
        for _ in range(num_steps):
            if self.caution == _MIN_CAUTION:
                return
            self.caution = max(self.caution * _LOWER_FACTOR, _MIN_CAUTION)

    @property
    def is_steady(self) -> bool:
        """Whether caution is at its lower bound. It stays there until the next preemption, so
        the expected growth of running sequences does not fall before they get the blocks."""
        return self.caution == _MIN_CAUTION

    def num_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that `sequences` are expected to need beyond what they have or ask for.

        Never more than their maximum length needs. One plain loop, because it runs over all
        running sequences in every step that examines the queue.
        """
        blocks = 0
        block_tokens = self._block_tokens
        mean = self.mean_tokens * self.caution
        least = mean * _OVERDUE_SHARE
        for sequence in sequences:
            num_tokens = sequence.num_tokens
            left = mean - (num_tokens - sequence.prompt_tokens) * self.caution
            end = num_tokens + int(left if left > least else least)
            if end > sequence.max_computed:
                end = sequence.max_computed
            more = -(-end // block_tokens) - (sequence.num_blocks or sequence.num_blocks_wanted)
            if more > 0:
                blocks += more
        return blocks


def _miss_reason(sequence: Sequence, match: Match | None) -> str | None:
    """Why not more of the prompt was cached, or why cached blocks were not used."""
    if match is None:
        return "caching_off"
    load = sequence.load
    if load is not None and match.device_blocks < match.num_blocks:
        choice = "in_lower_tier" if load.choice is None else load.choice.reason
        return load.ended or load.shortfall or choice
    if match.reason is None:
        return None
    if load is not None and (load.ended or load.shortfall):
        return load.ended or load.shortfall
    return match.reason.value
