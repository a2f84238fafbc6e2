"""Waiting for a prefix that another sequence is computing right now.

A follower holds no slots and no lease. It follows only a *running* sequence, which has all its
slots and so always gets there, and it follows once: it never waits for a waiting sequence, in
a circle, or beyond its deadline.
"""

from collections.abc import Mapping

from headwater.cache import Match
from headwater.scheduler.sequence import Sequence
from headwater.types import RequestId


def still_follows(sequence: Sequence, now: float) -> bool:
    """Whether `sequence` has to wait on; forgets its leader when it has not.

    It wakes when the blocks are committed, when the leader does not run any more, and when
    the deadline has come.
    """
    leader, until_s = sequence.leader, sequence.follow_until_s
    if leader is None or until_s is None:
        return False
    waits = leader.is_running and leader.num_committed < sequence.follow_blocks
    if not waits or now >= until_s:
        sequence.leader = None
    return sequence.leader is not None


def starts_following(
    sequence: Sequence,
    match: Match,
    alive: Mapping[RequestId, Sequence],
    *,
    min_blocks: int,
    until_s: float,
) -> bool:
    """Whether `sequence` is better off waiting for what `match` found in flight; notes it.

    Not a second time, and not when it was preempted: then it has waited enough.
    """
    flight = match.in_flight
    if flight is None or flight.num_blocks < min_blocks:
        return False
    if sequence.follow_until_s is not None or sequence.num_preemptions:
        return False
    leader = alive.get(flight.sequence)
    if leader is None or not leader.is_running:
        return False
    sequence.leader = leader
    sequence.follow_blocks = match.num_blocks + flight.num_blocks
    sequence.follow_until_s = until_s
    return True
