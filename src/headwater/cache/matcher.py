"""Matching: how far a path is cached, tier by tier, and why no further.

Matching changes nothing. It searches the tree, the prefixes that running sequences are
computing (announced, but not findable yet), and the ghosts. Ghosts remember why evicted blocks
are not cached any more; they are bounded, and the oldest are forgotten first. The ledger counts
hits and miss reasons.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from headwater.cache.jobs import loading_job
from headwater.cache.keys import TokenPath
from headwater.cache.node import Node
from headwater.cache.plan import InFlight, Lease, Match, MissReason
from headwater.cache.tree import PrefixTree
from headwater.types import Tier


class InFlightPrefixes:
    """Leases of sequences that are computing blocks, by place: the last node of the lease and
    the first block after it.

    If two sequences compute the same blocks, a match names the first that announced them.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.by_place: dict[tuple[Node, bytes], Lease] = {}

    def announce(self, lease: Lease, path: TokenPath) -> None:
        """Record that the owner of `lease` computes the blocks of `path` after the leased
        ones."""
        if lease.place is not None:
            self.withdraw(lease)
        if lease.num_blocks < path.num_blocks(self._tree.scheme.block_tokens):
            lease.pending = path
            lease.place = (lease.node, self._tree.first(path, lease.num_blocks))
            self.by_place.setdefault(lease.place, lease)

    def withdraw(self, lease: Lease) -> None:
        """Remove what `announce` recorded for `lease`."""
        place = lease.place
        if place is not None:
            lease.pending = lease.place = None
            if self.by_place.get(place) is lease:
                del self.by_place[place]

    def find(
        self, node: Node, first: bytes, path: TokenPath, max_blocks: int
    ) -> InFlight | None:
        """Which sequence computes the block `first` of `path` after `node`, and how many more
        blocks of `path` it computes."""
        lease = self.by_place.get((node, first))
        if lease is None or lease.pending is None:
            return None
        return InFlight(lease.owner, self._common(lease.pending, path, node.end, max_blocks))

    def clear(self) -> None:
        """Forget all announcements: the tree they refer to is empty."""
        for lease in self.by_place.values():
            lease.pending = lease.place = None
        self.by_place.clear()

    def _common(self, theirs: TokenPath, mine: TokenPath, block: int, max_blocks: int) -> int:
        """How many blocks, from `block` on, are equal in both paths.

        One numpy comparison covers all blocks; with one for each block, a prompt of 128k tokens
        would take 16 ms.
        """
        size = self._tree.scheme.block_tokens
        end = min(theirs.num_blocks(size), max_blocks)
        differs = (
            theirs.tokens[block * size : end * size] != mine.tokens[block * size : end * size]
        )
        first = int(np.argmax(differs)) if differs.any() else len(differs)
        count = first // size
        if theirs.media is not None or mine.media is not None:
            a, b = theirs.media or {}, mine.media or {}
            touched = (
                i for i in {*a, *b} if block <= i < block + count and a.get(i) != b.get(i)
            )
            count = min(touched, default=block + count) - block
        return count


Ghost: TypeAlias = tuple[MissReason, int, int]
"""Why a node left the tree, its uid, and how often it was used. A node created again at its
place takes over the uid, so that the ghosts of its children are still found."""

_Place: TypeAlias = tuple[int, int, bytes]


class Ghosts:
    """Ghosts by place: the parent node, the depth, and the first block.

    Namespaces have different roots, so a tenant can find only its own ghosts. There are two
    generations of up to half of the limit each: the older one is forgotten in one step, and
    adding needs no ordering.
    """

    def __init__(self, max_ghosts: int) -> None:
        self._half = max_ghosts // 2
        self._young: dict[_Place, Ghost] = {}
        self._old: dict[_Place, Ghost] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, nodes: Sequence[Node], reason: MissReason) -> int:
        """Remember `nodes`, which were removed from the tree; return their number of blocks."""
        young, blocks = self._young, 0
        for node in nodes:
            young[node.parent.uid, node.start, node.first] = (  # type: ignore[union-attr]  # never a root
                reason,
                node.uid,
                node.num_uses,
            )
            blocks += node.num_blocks
        if len(young) > self._half:
            # A batch that alone exceeds the limit is forgotten at once.
            self._old = young if len(young) <= 2 * self._half else {}
            self._young = {}
        return blocks

    def find(self, parent: Node, depth: int, first: bytes) -> MissReason | None:
        """Why the block at this place was removed, if that is remembered."""
        place = (parent.uid, depth, first)
        ghost = self._young.get(place) or self._old.get(place)
        return None if ghost is None else ghost[0]

    def revive(self, parent: Node, depth: int, first: bytes) -> Ghost | None:
        """Remove the ghost at this place and return it."""
        if not self._young and not self._old:
            return None
        place = (parent.uid, depth, first)
        return self._young.pop(place, None) or self._old.pop(place, None)

    def clear(self) -> None:
        """Forget all ghosts."""
        self._young.clear()
        self._old.clear()


class Matcher:
    """Searches the tree, the prefixes being computed, and the ghosts."""

    def __init__(self, tree: PrefixTree, in_flight: InFlightPrefixes, ghosts: Ghosts) -> None:
        self._tree = tree
        self._in_flight = in_flight
        self._ghosts = ghosts

    def match(self, path: TokenPath, limit: int) -> Match:
        """The match of the first `limit` blocks of `path`."""
        nodes, found = self._tree.walk(path, limit)
        match = Match(path, limit, nodes, (self._tree, self._tree.version))
        _measure(match, found)
        if found < limit:
            self._explain(match, found)
        elif limit == 0:
            match.reason = MissReason.TOO_SHORT
        return match

    def _explain(self, match: Match, found: int) -> None:
        """Set the reason why `match` ended after `found` blocks."""
        match.reason = MissReason.NEVER_SEEN
        path = match.path
        nodes = match.nodes
        node = nodes[-1] if nodes else self._tree.roots.get(path.namespace)
        if node is None or node.start + node.num_blocks != found:
            return
        first = self._tree.first(path, found)
        if self._in_flight.by_place:
            match.in_flight = self._in_flight.find(node, first, path, match.max_blocks)
            if match.in_flight is not None:
                match.reason = MissReason.IN_FLIGHT
                return
        lost = self._tree.lost_after(node, first) or self._ghosts.find(node, found, first)
        if lost is not None:
            match.reason = lost


def _measure(match: Match, found: int) -> None:
    """Count the blocks of `match` in each tier; `found` is their sum."""
    for node in match.nodes:
        if len(node.device) < node.num_blocks:
            break
    else:
        match.device_blocks = found
        return
    # A block counts for the highest tier that has it: first the device, then the host.
    left = found
    for node in match.nodes:
        count = min(node.num_blocks, left)
        left -= count
        device = min(len(node.device), count)
        match.device_blocks += device
        if device == count:
            continue
        host = max(min(len(node.host), count), device)
        if match.loading is None:
            match.loading = loading_job(node)
        match.host_blocks += host - device
        match.storage_blocks += count - host


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStats:
    """Totals since the cache was created."""

    queries: int
    prompt_tokens: int
    tokens_by_tier: Mapping[Tier, int]
    """Prompt tokens whose blocks were found, by the tier they were found in."""

    misses_by_reason: Mapping[MissReason, int]
    """Requests whose match ended early, by the first reason."""

    @property
    def found_tokens(self) -> int:
        return sum(self.tokens_by_tier.values())


class Ledger:
    """Counts hits and misses; the reader of `stats` computes ratios.

    A match is counted when it is leased, once per request: probes and resumed sequences are not
    counted again.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._queries = 0
        self._prompt_tokens = 0
        self._blocks = [0, 0, 0]
        self._reasons: Counter[MissReason] = Counter()

    def record(self, match: Match) -> None:
        """Count a match that a request is going to use."""
        self._queries += 1
        self._prompt_tokens += len(match.path.tokens)
        blocks = self._blocks
        blocks[0] += match.device_blocks
        blocks[1] += match.host_blocks
        blocks[2] += match.storage_blocks
        if match.reason is not None:
            self._reasons[match.reason] += 1

    def stats(self) -> LedgerStats:
        """The totals now."""
        return LedgerStats(
            queries=self._queries,
            prompt_tokens=self._prompt_tokens,
            tokens_by_tier={t: self._blocks[t] * self._block_tokens for t in Tier},
            misses_by_reason=dict(self._reasons),
        )
