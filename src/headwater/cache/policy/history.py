"""The history of requests: which prefixes were used, how often, by which turn, and when.

It covers cached and evicted prefixes, so a session is still known when it returns after its
blocks were evicted. It is bounded in size and in time; the oldest entries are forgotten first.
"""

from itertools import repeat
from typing import NamedTuple, TypeAlias

from headwater.cache.plan import Lease
from headwater.cache.policy.base import FinishedRequest
from headwater.cache.policy.fingerprint import Fingerprints
from headwater.cache.policy.traits import Relation, Traits

_TRUNK_CHILDREN = 16
"""A prefix with this many different continuations belongs to no session."""

_FORGET_S = 3600.0
_MAX_PREFIXES = 1 << 18


class PastRequest(NamedTuple):
    """What later requests of the same session need to know about a request."""

    turn: int
    num_pieces: int
    prompt_tokens: int


class PrefixUse:
    """The last use of a part of a path, up to piece `end`. A later request with a common prefix
    replaces the entries of the leading pieces."""

    __slots__ = ("asked", "end", "middle", "sample", "separate", "traits", "uses")

    def __init__(
        self, asked: PastRequest, uses: int, start: int, end: int, traits: int
    ) -> None:
        self.asked = asked
        self.uses = uses
        self.end = end
        self.middle = (start + end) // 2
        """The piece in the middle of the run: a request that uses it again counts as a return
        of the run."""
        self.traits = traits
        self.separate = False
        """Whether the run is the last piece of its path and not full."""
        self.sample = -1
        """Index in the log of samples."""


KnownRuns: TypeAlias = list[tuple[int, int, PrefixUse]]
"""The known part of a path: runs [start, end) of pieces, each with its last use."""


class RequestHistory(NamedTuple):
    """A request and what was known about its path before."""

    runs: list[PrefixUse]
    returned: list[int]
    """Samples of runs that this request used again."""

    session: int
    """A number that all requests of a session share."""

    prefixes: list[int]


class History:
    """Finds the runs of a path with O(runs × log pieces) lookups; keeps one dict entry per
    piece."""

    def __init__(self, block_tokens: int, blocks_per_piece: int) -> None:
        self.blocks_per_piece = blocks_per_piece
        self._piece_tokens = blocks_per_piece * block_tokens
        self._fingerprints = Fingerprints(self._piece_tokens, blocks_per_piece)
        # Two generations each: the older one is forgotten in one step.
        self._young: dict[int, PrefixUse] = {}
        self._old: dict[int, PrefixUse] = {}
        self._children: dict[int, int] = {}
        self._old_children: dict[int, int] = {}
        self._trunks: set[int] = set()
        """Prefixes with so many continuations that they belong to no session."""
        self._since = 0.0

    def see(self, lease: Lease, finished: FinishedRequest, now: float) -> RequestHistory | None:
        """Find the history of the path under `lease`, and record this request as its latest
        use."""
        count = lease.num_blocks // self.blocks_per_piece
        if not count:
            return None
        if len(self._young) > _MAX_PREFIXES // 2 or now - self._since > _FORGET_S:
            self._forget(now)
        prefixes = self._fingerprints.of(lease.path, count)
        before = self._past(prefixes)
        known = before[-1][1] if before else 0
        if 0 < known < count:
            self._add_child(prefixes[known - 1])
        first, trunks = 0, self._trunks
        while first < known and prefixes[first] in trunks:
            first += 1
        asked, traits = self._relate(count, before, first, finished)
        # Only a replay has a last block that is not full: there, the path is longer than the
        # prompt.
        grown = len(lease.path.tokens) - lease.prompt_tokens
        partial = count * self._piece_tokens > finished.prompt_tokens + grown
        returned = [past.sample for start, end, past in before if start <= past.middle < end]
        runs = self._replace(prefixes, before, asked, traits, partial)
        return RequestHistory(runs, returned, prefixes[min(first, count - 1)], prefixes)

    def _past(self, prefixes: list[int]) -> KnownRuns:
        """The known part of a path."""
        runs: KnownRuns = []
        at, count = 0, len(prefixes)
        young, old, find = self._young.get, self._old.get, self._find
        while at < count:
            past = young(prefixes[at]) or old(prefixes[at])
            # A run that ends before this prefix belongs to another path with the same number by
            # chance.
            if past is None or past.end <= at:
                break
            end = min(past.end, count)
            if (young(prefixes[end - 1]) or old(prefixes[end - 1])) is not past:
                low, end = at + 1, end - 1
                while low < end:
                    half = (low + end + 1) // 2
                    if find(prefixes[half - 1]) is past:
                        low = half
                    else:
                        end = half - 1
                end = low
            runs.append((at, end, past))
            at = end
        return runs

    def _relate(
        self, count: int, before: KnownRuns, first: int, finished: FinishedRequest
    ) -> tuple[PastRequest, Traits]:
        """This request, and what all its runs have in common."""
        output, hint = finished.output_tokens, finished.hint
        full = min(count, finished.prompt_tokens // self._piece_tokens)
        if not before or before[-1][1] <= first:
            asked = PastRequest(1, full, finished.prompt_tokens)
            return asked, Traits(1, Relation.FIRST, None, output, hint)
        _, known, past = before[-1]
        last = past.asked
        asked = PastRequest(last.turn + 1, full, finished.prompt_tokens)
        relation = Relation.CONTINUES if known >= last.num_pieces else Relation.BRANCHES
        growth = finished.prompt_tokens - last.prompt_tokens
        return asked, Traits(asked.turn, relation, growth, output, hint)

    def _replace(
        self,
        prefixes: list[int],
        before: KnownRuns,
        asked: PastRequest,
        traits: Traits,
        partial: bool,
    ) -> list[PrefixUse]:
        """Record the runs of this request; their use counts continue those of the past."""
        count = len(prefixes)
        known = before[-1][1] if before else 0
        runs = []
        for start, end, uses in _use_counts(before, count, partial):
            if partial and end == count:
                kind = traits.partial(again=known == count)
            elif prefixes[end - 1] in self._trunks:
                kind = traits.trunk()
            else:
                kind = traits.used(uses)
            past = PrefixUse(asked, uses, start, end, kind)
            past.separate = partial and end == count
            self._young.update(zip(prefixes[start:end], repeat(past), strict=False))
            runs.append(past)
        return runs

    def _find(self, prefix: int) -> PrefixUse | None:
        return self._young.get(prefix) or self._old.get(prefix)

    def _add_child(self, prefix: int) -> None:
        known = self._children.get(prefix) or self._old_children.get(prefix, 0)
        self._children[prefix] = known + 1
        if known + 1 >= _TRUNK_CHILDREN:
            self._trunks.add(prefix)

    def _forget(self, now: float) -> None:
        self._old, self._young = self._young, {}
        self._old_children, self._children = self._children, {}
        known = self._old_children.items()
        self._trunks = {prefix for prefix, num in known if num >= _TRUNK_CHILDREN}
        self._since = now


def _use_counts(before: KnownRuns, count: int, partial: bool) -> list[tuple[int, int, int]]:
    """The runs [start, end) of a request's `count` pieces, with their use counts. Neighbours
    with equal counts form one run; a partial last piece is a run of its own."""
    runs: list[tuple[int, int, int]] = []
    for start, end, past in before:
        uses = past.uses + 1
        if runs and runs[-1][2] == uses:
            start = runs.pop()[0]
        runs.append((start, end, uses))
    known = runs[-1][1] if runs else 0
    if known < count:
        runs.append((known, count, 1))
    start, end, uses = runs[-1]
    if partial and end - start > 1:
        runs[-1:] = [(start, end - 1, uses), (end - 1, end, uses)]
    return runs
