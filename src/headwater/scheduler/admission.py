"""Whether a sequence may start: one function, for every asker.

Why someone always finishes, whatever the pool and the load:

1. A sequence is admitted with slots for *all* its tokens at once, the partial last block
   included. A prefill therefore never asks for another block and is never a victim. Prefills
   are computed in the order of admission, and a step has more tokens than decodes while there
   is a prefill, because it has at least as many tokens as sequences may run. So each admission
   ends in at least one newly chosen token, unless the request is aborted or rode on a promotion
   that failed; a request starts few promotions, and computes when they are spent.
2. Only decoding sequences are preempted. By 1 each has chosen a token since it was admitted,
   and a preempted sequence keeps its tokens. A request chooses finitely many tokens, so it is
   preempted finitely often.
3. When nothing runs, no block is leased or held. Blocks of transfers in flight come back when
   those end, and each has a deadline; then the whole pool is available. A request that needs
   more than the whole pool at its longest was refused when it came. So the head is admitted:
   that is the `num_running == 0` line below, which asks for no reserve.
4. When something runs, a step computes at least one row, or waits for a step in flight that
   will end or vacate a sequence, or preempts. By 2 it cannot preempt for ever.
5. A sequence that a peer fills runs, with slots for all its prompt, and is no victim. It computes
   nothing, but its lease ends, by delivery or by its term, and then 1 or 3 holds for it.

The reserve for growth is thus never needed for progress. It is what keeps a full pool from
admitting sequences only to preempt them again.
"""

from enum import Enum, auto


class AdmissionResult(Enum):
    """What became of a waiting sequence that was looked at."""

    ADMITTED = auto()
    BLOCKED = auto()
    """There is no room for it now. Others may pass, a bounded number of times."""

    LOADING = auto()
    """It waits, by choice, for blocks on their way up from a lower tier."""

    FOLLOWING = auto()
    """It waits, by choice, for blocks that a running sequence is computing."""


def admits(*, num_needed: int, num_available: int, num_growth: int, num_running: int) -> bool:
    """Whether `num_needed` blocks may be taken now.

    `num_needed` are the blocks to be held: all that the sequence's tokens fill, less those
    that were found. `num_available` are the blocks that could be taken, not counting found
    ones, which are about to be leased. `num_growth` is what the running sequences and this
    one are expected to need later.
    """
    if num_running == 0:
        return num_needed <= num_available
    return num_needed + num_growth <= num_available
