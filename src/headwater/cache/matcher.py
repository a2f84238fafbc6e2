"""Matching: how far a path is cached, tier by tier, and why no further. Changes nothing."""

from headwater.cache.ghosts import Ghosts
from headwater.cache.inflight import InFlightPrefixes
from headwater.cache.jobs import loading_job
from headwater.cache.keys import TokenPath
from headwater.cache.plan import Match, MissReason
from headwater.cache.tree import PrefixTree


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
        if node is None or node.end != found:
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
