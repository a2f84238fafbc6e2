"""What the orders of the session policy share: the history, the hazard model and the
classes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headwater.cache.node import RetentionMark
from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest, MarkedRun
from headwater.cache.policy.hazard import HazardModel
from headwater.cache.policy.history import History
from headwater.cache.policy.samples import HazardSamples
from headwater.cache.policy.traits import (
    NUM_FEATURES,
    NUM_UNHINTED,
    PRIORS,
    UNKNOWN,
    features_of,
)
from headwater.cache.policy.weights import Weights

PIECE_TOKENS = 256
"""Prefixes are distinguished in steps of at least this many tokens, in full blocks."""

_LEARN_EVERY = 32
"""Learn once per this many requests, from all samples that became ready since."""

_MIN_BATCH, _MAX_BATCH = 256, 2048
_REFRESH_SHARE = 0.06
"""Densities are computed again when this share of all samples is new."""

_MANY = 100_000
"""After this many samples, only every second request is used for learning."""

_MIN_REFRESH, _MAX_REFRESH = 256, 16_384


_TRUST = 0.5
"""Share of weights learned elsewhere that an engine starts with."""

FIRST_SAMPLES = 1_024
"""The order is that of an LRU until this many samples of the engine's own traffic were learned.
Before that, some classes have no sample, and densities learned from other classes order them
wrongly: blocks of ended sessions stayed and blocks of new sessions were evicted."""


_CERTAIN = 1e6
"""A density that no learned class reaches: hits per block-second."""


class Visit(NamedTuple):
    """One request that ended, in pieces, for observers."""

    session: int
    """A number that all requests of a session share."""

    prefixes: list[int]
    runs: list[MarkedRun]
    """The marked runs of the path; their ends are counted in pieces."""

    blocks_per_piece: int
    now: float


class Retention:
    """Makes marked runs from requests, and learns hit densities from how soon runs are used again.

    `version` changes when densities change; an order that sorts nodes by density reads it.
    """

    def __init__(
        self,
        block_tokens: int,
        piece_tokens: int = PIECE_TOKENS,
        weights: Weights | None = None,
        first_samples: int = 0,
    ) -> None:
        """`is_trained` becomes true after `first_samples` samples."""
        self._first_samples = first_samples
        self._history = History(block_tokens, max(1, piece_tokens // block_tokens))
        self._samples = HazardSamples()
        self._classes: dict[int, int] = {}
        self._kinds: dict[tuple[int, int], int] = {}
        """The first class of each kind and hint."""
        self.hazards = HazardModel(NUM_FEATURES, NUM_UNHINTED, PRIORS)
        self._is_taught = weights is not None
        if weights is not None:
            self.hazards.bias += _TRUST * (weights.bias - self.hazards.bias)
            self.hazards.weights += _TRUST * (weights.features - self.hazards.weights)
        self.closed = self.hazards.add_fixed(-1.0)
        """The class of runs that will not be used again, according to their client. Its density
        is below all others."""
        self.wanted = self.hazards.add_fixed(_CERTAIN)
        """The class of runs that a waiting request will use. Its density is above all others."""
        self.version = 0
        self.now = 0.0
        self.watch: Callable[[Visit], None] | None = None
        """Called with every request that ended."""
        self._visits = 0
        self._learned = 0
        self._unseen = 0
        self._fresh = 0
        """Number of classes with densities of their own; the later classes use those of their
        kind."""
        self.unknown = self._class_of(UNKNOWN)
        """The class of a run that no finished request has marked."""

    @property
    def is_trained(self) -> bool:
        """Whether enough was learned here to order blocks by density."""
        return self._learned >= self._first_samples

    def visit(self, lease: Lease, finished: FinishedRequest, now: float) -> Sequence[MarkedRun]:
        """A request ended: learn from the runs that it used again, and mark the runs of its
        path."""
        now = self.now = max(self.now, now)
        self._visits += 1
        if self._visits % _LEARN_EVERY == 0:
            self._learn()
        seen = self._history.see(lease, finished, now)
        if seen is None:
            return ()
        for number in seen.returned:
            self._samples.came_back(number, lease.since)
        runs = []
        per, known = self._history.blocks_per_piece, self._classes
        watched = self._learned < _MANY or self._visits & 1
        if finished.hint is not None and finished.hint.closed:
            # A session with a hint that does not return is no evidence about sessions without a
            # hint.
            watched = False
        for past in seen.runs:
            run_class = known.get(past.traits)
            if run_class is None:
                run_class = self._class_of(past.traits)
            if watched:
                past.sample = self._samples.add(run_class, now)
            mark = RetentionMark(now, run_class, past.uses)
            runs.append(MarkedRun(past.end, mark, past.separate))
        if self.watch is not None:
            self.watch(Visit(seen.session, seen.prefixes, runs, per, now))
        if per > 1:
            runs = [MarkedRun(end * per, mark, separate) for end, mark, separate in runs]
            runs[-1] = runs[-1]._replace(end=lease.num_blocks)
        return runs

    def learned(self) -> Weights:
        """What was learned so far, from all traffic."""
        return Weights(bias=self.hazards.bias.copy(), features=self.hazards.weights.copy())

    def _class_of(self, traits: int) -> int:
        """The class with these traits; created on first use."""
        known = self._classes.get(traits)
        if known is None:
            features = features_of(traits)
            kind = features[0], features[-1] if len(features) > NUM_UNHINTED else 0
            # Before learning, all classes of one kind have the same densities.
            like = None if self._is_taught else self._kinds.get(kind)
            known = self._classes[traits] = self.hazards.add_class(features, like)
            self._kinds.setdefault(kind, known)
        return known

    def _learn(self) -> None:
        classes, bins, returned = self._samples.ready(self.now)
        # When much has been learned, steps are small, and many steps can be joined into one.
        batch = min(max(_MIN_BATCH, self._learned >> 7), _MAX_BATCH)
        for at in range(0, len(bins), batch):
            end = at + batch
            self.hazards.learn(classes[at:end], bins[at:end], returned[at:end])
        self._learned += len(bins)
        self._unseen += len(bins)
        due = min(max(_REFRESH_SHARE * self._learned, _MIN_REFRESH), _MAX_REFRESH)
        if self._unseen >= due:
            self._unseen = 0
            self.hazards.refresh()
            self.version += 1
        elif self._fresh < self.hazards.num_classes:
            self.hazards.refresh(self._fresh)
        self._fresh = self.hazards.num_classes
