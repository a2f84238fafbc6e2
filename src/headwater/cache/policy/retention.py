"""What the session policy knows, shared by the tiers: the past, the hazards, the classes."""

from collections.abc import Sequence

from headwater.cache.lease import Lease
from headwater.cache.node import Mark
from headwater.cache.policy.base import Run, Turn
from headwater.cache.policy.hazard import HazardModel
from headwater.cache.policy.history import (
    GROWTHS,
    NUM_KINDS,
    OUTPUTS,
    PARTIAL_AGAIN,
    TURNS,
    USES,
    History,
    Traits,
)
from headwater.cache.policy.samples import Samples

_LEARN_EVERY = 16
_BATCH = 256
_REFRESH_SHARE = 0.03
_MIN_REFRESH, _MAX_REFRESH = 256, 16_384

_TURN = 1 + NUM_KINDS
_RELATION = _TURN + len(TURNS)
_GROWTH = _RELATION + 3
_NUM_GROWTHS = len(GROWTHS) + 2
_OUTPUT = _GROWTH + _NUM_GROWTHS
_KIND_GROWTH = _OUTPUT + len(OUTPUTS) + 1
_KIND_OUTPUT = _KIND_GROWTH + len(USES) * _NUM_GROWTHS
_NUM_HALVES = len(OUTPUTS) // 2 + 1
_NUM_FEATURES = _KIND_OUTPUT + len(USES) * _NUM_HALVES
_PER_CLASS = 7


class Retention:
    """Turns requests into marked runs, and what comes back into densities.

    `version` changes when densities do; an order that keeps nodes by density reads it.
    """

    def __init__(self, block_tokens: int) -> None:
        self._history = History(block_tokens)
        self._samples = Samples()
        self._classes: dict[Traits, int] = {}
        self.hazards = HazardModel(_NUM_FEATURES, _PER_CLASS)
        self.version = 0
        self.now = 0.0
        self.session = 0
        """Of the last visit: a number that requests of a session share."""
        self._visits = 0
        self._learned = 0
        self._unseen = 0
        self.unknown = self.class_of(Traits(PARTIAL_AGAIN + 1))
        """The class of a run that no request has told anything about."""

    def visit(self, lease: Lease, turn: Turn, now: float) -> Sequence[Run]:
        """A request ended: learn from what it used again, and mark the runs of its path."""
        self.now = max(self.now, now)
        self._visits += 1
        if self._visits % _LEARN_EVERY == 0:
            self._learn()
        seen = self._history.see(lease, turn, now)
        if seen is None:
            return ()
        self.session = seen.session
        for number in seen.returned:
            self._samples.came_back(number, lease.since)
        runs = []
        per = self._history.blocks_per_piece
        for _, end, traits, past in seen.runs:
            run_class = self.class_of(traits)
            past.sample = self._samples.add(run_class, self.now)
            runs.append(Run(end * per, Mark(self.now, run_class)))
        if runs[-1].end < lease.num_blocks:
            runs[-1] = Run(lease.num_blocks, runs[-1].mark)
        return runs

    def class_of(self, traits: Traits) -> int:
        """The class with these traits, made when there is none yet."""
        known = self._classes.get(traits)
        if known is None:
            known = self._classes[traits] = self.hazards.add_class(_features(traits))
        return known

    def _learn(self) -> None:
        classes, bins, returned = self._samples.ready(self.now)
        for at in range(0, len(bins), _BATCH):
            end = at + _BATCH
            self.hazards.learn(classes[at:end], bins[at:end], returned[at:end])
        self._learned += len(bins)
        self._unseen += len(bins)
        due = min(max(_REFRESH_SHARE * self._learned, _MIN_REFRESH), _MAX_REFRESH)
        if self._unseen >= due:
            self._unseen = 0
            self.hazards.refresh()
            self.version += 1


def _features(traits: Traits) -> tuple[int, ...]:
    """The features that are on: the kind alone where that says it all."""
    kind, turn, relation, growth, output = traits
    if kind <= PARTIAL_AGAIN:
        return (1 + kind,)
    use = kind - PARTIAL_AGAIN - 1
    return (
        1 + kind,
        _TURN + turn,
        _RELATION + relation,
        _GROWTH + growth,
        _OUTPUT + output,
        _KIND_GROWTH + use * _NUM_GROWTHS + growth,
        _KIND_OUTPUT + use * _NUM_HALVES + output // 2,
    )
