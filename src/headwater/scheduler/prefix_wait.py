"""In-flight prefix sharing: waiting for a prefix that another sequence is computing.

A waiter holds no slots and no lease. It waits only for a *running* sequence, which has all its
slots and so always finishes the prefix: never for a waiting sequence or in a circle. It lends
its place in the order of prompts to the prefill it waits for. So prompts behind the waiter in
this order do not delay that prefill, and the waiter would not be faster if it computed the
prefix itself.
"""

from collections.abc import Mapping
from math import inf

from headwater.cache import Match
from headwater.scheduler.pacing import prompt_place
from headwater.scheduler.sequence import Sequence, SequenceState
from headwater.types import RequestId


def still_waits_for_prefix(sequence: Sequence, now: float) -> bool:
    """Whether `sequence` still waits for the prefix that another one is computing.

    The wait ends when the blocks are committed, when the computing sequence no longer runs, or
    at the deadline if a peer computes them. A prefill here is computed when its waiters would
    be, so they could not have these blocks earlier.
    """
    source = sequence.prefix_source
    if source is None:
        return False
    lacks = source.num_committed < sequence.prefix_wait_blocks
    receives = source.state is SequenceState.RECEIVING
    is_late = receives and now >= sequence.prefix_wait_until_s
    if not (source.is_running and lacks) or is_late:
        sequence.prefix_source = None
    return sequence.prefix_source is not None


def starts_prefix_wait(
    sequence: Sequence,
    match: Match,
    alive: Mapping[RequestId, Sequence],
    *,
    min_blocks: int,
    until_s: float,
) -> bool:
    """Whether `sequence` waits from now on for the prefix that `match` found in flight.

    It waits only once for blocks that a peer computes. After a preemption it does not wait:
    then it has waited enough.
    """
    in_flight = match.in_flight
    if in_flight is None or in_flight.num_blocks < min_blocks or sequence.num_preemptions:
        return False
    source = alive.get(in_flight.sequence)
    if source is None or not source.is_running:
        return False
    if source.state is SequenceState.RECEIVING:
        if sequence.prefix_wait_until_s < inf:
            return False
        sequence.prefix_wait_until_s = until_s
    sequence.prefix_source = source
    sequence.prefix_wait_blocks = match.num_blocks + in_flight.num_blocks
    return True


def lend_place(waiter: Sequence, block_tokens: int, prompt_clock: int) -> None:
    """Let the prefill that `waiter` waits for, if any, be computed when `waiter` would be."""
    source = waiter.prefix_source
    if source is None or source.state is not SequenceState.PREFILL:
        return
    num_lacking = waiter.num_tokens - source.num_committed * block_tokens
    place = prompt_place(waiter, num_lacking, prompt_clock)
    if source.waiter_place is None or place < source.waiter_place:
        source.waiter_place = place
