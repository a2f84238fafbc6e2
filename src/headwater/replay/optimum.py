"""The most hits that any eviction policy could have: Belady's rule, with knowledge of the whole
trace.

When a request has ended and the cache holds too much, the block whose next use is latest is
evicted first, whether it is old or new. A block that is never used again does not stay at all.
A block is used whenever a block after it is used, so leaves are always evicted first.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from headwater.replay.trace import TraceRequest

NEVER = 1 << 62
"""A number above that of any request."""


def optimal_hits(requests: Sequence[TraceRequest], capacity_blocks: int) -> Iterator[int]:
    """Blocks that each request finds in a cache of `capacity_blocks`; their sum is the
    maximum."""
    paths = [request.hash_ids for request in requests]
    resident: dict[int, int] = {}
    """The next use of each block in the cache."""
    latest: list[tuple[int, int, int]] = []
    for path, uses in zip(paths, next_uses(paths), strict=True):
        yield _leading(path, resident)
        for depth, (block, use) in enumerate(zip(path, uses, strict=True)):
            if use == NEVER:
                resident.pop(block, None)
            else:
                resident[block] = use
                # Latest use first; among blocks of one request, the deepest first.
                heappush(latest, (-use, -depth, block))
        while len(resident) > capacity_blocks:
            use, _, block = heappop(latest)
            if resident.get(block) == -use:
                del resident[block]


def next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each path, the number of the next path that contains it."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number]
        uses.append([following.get(block, NEVER) for block in path])
        following.update(dict.fromkeys(path, number))
    return uses[::-1]


def _leading(path: Sequence[int], resident: dict[int, int]) -> int:
    """Number of leading blocks of `path` in the cache."""
    for found, block in enumerate(path):
        if block not in resident:
            return found
    return len(path)
