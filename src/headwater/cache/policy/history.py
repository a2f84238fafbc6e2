"""What is known of the past: which prefixes were used, how often, by which turn, and when.

Kept for what is cached and what is not: a session that was evicted is still known when it
returns. Bounded in blocks and in time; the oldest is forgotten first.
"""

from bisect import bisect_right
from itertools import repeat
from typing import NamedTuple

from headwater.cache.lease import Lease
from headwater.cache.policy.base import Turn
from headwater.cache.policy.fingerprint import Fingerprints

PIECE_TOKENS = 256
"""Prefixes are told apart in steps of at least this many tokens, in whole blocks."""

TRUNK_CHILDREN = 16
"""A prefix that this many different ones follow belongs to no session."""

_FORGET_S = 3600.0
_MAX_PREFIXES = 1 << 18


class Traits(NamedTuple):
    """What a run of blocks is, as far as that tells when it comes back. All are buckets."""

    kind: int
    turn: int = 0
    relation: int = 0
    growth: int = 0
    output: int = 0


TRUNK, PARTIAL, PARTIAL_AGAIN = 0, 1, 2
USES = (1, 2, 3, 4, 6, 10)
"""Where buckets of use counts begin; their kinds follow those above."""

TURNS = (1, 2, 3, 4, 6, 9)
GROWTHS = (0, 100, 300, 600, 1_000, 2_000, 4_000, 8_000)
OUTPUTS = (2, 5, 20, 50, 100, 200, 400, 800)
FIRST, CONTINUES, BRANCHES = 0, 1, 2
NUM_KINDS = 3 + len(USES)
NO_GROWTH = len(GROWTHS) + 1


class Past:
    """The pieces [start, end) of a path, when they were last used. Taken over from the front."""

    __slots__ = ("asked", "end", "middle", "sample", "uses")

    def __init__(self, asked: "Asked", uses: int, start: int, end: int) -> None:
        self.asked = asked
        self.uses = uses
        self.end = end
        self.middle = (start + end) // 2
        """Stands for the run when it is learned whether it comes back."""
        self.sample = -1
        """Where it is in the log of samples."""


class Asked(NamedTuple):
    """One request, as far as later ones of its session want to know."""

    turn: int
    num_pieces: int
    prompt_tokens: int


class Seen(NamedTuple):
    """A request beside its past: its runs as (start, end, traits, what is remembered)."""

    runs: list[tuple[int, int, Traits, Past]]
    returned: list[int]
    """Samples that came back with this request."""

    session: int
    """A number that the requests of a session share."""


class History:
    """Finds and replaces the past of a path; O(runs + log pieces) and one dict entry a piece."""

    def __init__(self, block_tokens: int) -> None:
        self.blocks_per_piece = max(1, PIECE_TOKENS // block_tokens)
        self._piece_tokens = self.blocks_per_piece * block_tokens
        self._fingerprints = Fingerprints(self._piece_tokens)
        # Two generations each; forgetting the older one is one step.
        self._young: dict[int, Past] = {}
        self._old: dict[int, Past] = {}
        self._children: dict[int, int] = {}
        self._old_children: dict[int, int] = {}
        self._since = 0.0

    def see(self, lease: Lease, turn: Turn, now: float) -> Seen | None:
        """Find the past of the path under `lease`, and make this request its latest part."""
        count = lease.num_blocks // self.blocks_per_piece
        if not count or lease.path is None:
            return None
        if len(self._young) > _MAX_PREFIXES // 2 or now - self._since > _FORGET_S:
            self._forget(now)
        prefixes = self._fingerprints.of(lease.path, count, self.blocks_per_piece)
        before = self._past(prefixes)
        known = before[-1][1] if before else 0
        if 0 < known < count:
            self._add_child(prefixes[known - 1])
        first = 0
        while first < known and self._is_trunk(prefixes[first]):
            first += 1
        asked, common = self._relate(prefixes, before, first, turn)
        returned = [p.sample for a, b, p in before if a <= p.middle < b]
        # Only a replay has a last block that is not full: its path is longer than its prompt.
        grown = len(lease.path.tokens) - lease.prompt_tokens
        partial = count * self._piece_tokens > turn.prompt_tokens + grown
        runs = self._replace(prefixes, before, asked, common, partial)
        return Seen(runs, returned, prefixes[min(first, count - 1)])

    def _past(self, prefixes: list[int]) -> list[tuple[int, int, Past]]:
        """The known part of a path as runs [start, end) with one past each."""
        runs = []
        at, count = 0, len(prefixes)
        while at < count:
            past = self._find(prefixes[at])
            if past is None:
                break
            end = min(past.end, count)
            if self._find(prefixes[end - 1]) is not past:
                low, end = at + 1, end - 1
                while low < end:
                    half = (low + end + 1) // 2
                    if self._find(prefixes[half - 1]) is past:
                        low = half
                    else:
                        end = half - 1
                end = low
            runs.append((at, end, past))
            at = end
        return runs

    def _relate(
        self,
        prefixes: list[int],
        before: list[tuple[int, int, Past]],
        first: int,
        turn: Turn,
    ) -> tuple[Asked, Traits]:
        """This request, and the traits that all its runs share."""
        full = min(len(prefixes), turn.prompt_tokens // self._piece_tokens)
        output = bisect_right(OUTPUTS, turn.output_tokens)
        if not before or before[-1][1] <= first:
            asked = Asked(1, full, turn.prompt_tokens)
            return asked, Traits(0, 0, FIRST, NO_GROWTH, output)
        last = before[-1][2].asked
        asked = Asked(last.turn + 1, full, turn.prompt_tokens)
        continues = before[-1][1] >= last.num_pieces
        return asked, Traits(
            0,
            bisect_right(TURNS, asked.turn) - 1,
            CONTINUES if continues else BRANCHES,
            bisect_right(GROWTHS, turn.prompt_tokens - last.prompt_tokens),
            output,
        )

    def _replace(
        self,
        prefixes: list[int],
        before: list[tuple[int, int, Past]],
        asked: Asked,
        common: Traits,
        partial: bool,
    ) -> list[tuple[int, int, Traits, Past]]:
        """Make runs of this request and remember them; use counts go on from the past."""
        count = len(prefixes)
        pieces = [(a, b, past.uses + 1) for a, b, past in before]
        known = pieces[-1][1] if pieces else 0
        if known < count:
            pieces.append((known, count, 1))
        if partial and pieces[-1][1] - pieces[-1][0] > 1:
            start, _, uses = pieces.pop()
            pieces += [(start, count - 1, uses), (count - 1, count, uses)]
        runs = []
        for start, end, uses in _merged(pieces, partial):
            past = Past(asked, uses, start, end)
            if partial and end == count:
                traits = Traits(PARTIAL_AGAIN if known == count else PARTIAL)
            elif self._is_trunk(prefixes[end - 1]):
                traits = Traits(TRUNK)
            else:
                traits = common._replace(kind=2 + bisect_right(USES, uses))
            self._young.update(zip(prefixes[start:end], repeat(past), strict=False))
            runs.append((start, end, traits, past))
        return runs

    def _find(self, prefix: int) -> Past | None:
        return self._young.get(prefix) or self._old.get(prefix)

    def _is_trunk(self, prefix: int) -> bool:
        children = self._children.get(prefix) or self._old_children.get(prefix, 0)
        return children >= TRUNK_CHILDREN

    def _add_child(self, prefix: int) -> None:
        known = self._children.get(prefix) or self._old_children.get(prefix, 0)
        self._children[prefix] = known + 1

    def _forget(self, now: float) -> None:
        self._old, self._young = self._young, {}
        self._old_children, self._children = self._children, {}
        self._since = now


def _merged(pieces: list[tuple[int, int, int]], partial: bool) -> list[tuple[int, int, int]]:
    """Neighbours with equal use counts as one; a partial last piece stays apart."""
    merged: list[tuple[int, int, int]] = []
    last = len(pieces) - 1
    for number, (start, end, uses) in enumerate(pieces):
        if merged and merged[-1][2] == uses and not (partial and number == last):
            start = merged.pop()[0]
        merged.append((start, end, uses))
    return merged
