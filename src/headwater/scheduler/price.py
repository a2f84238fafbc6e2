"""Load or recompute: what a prefix below the device costs either way, and which is less.

Arithmetic over measured speeds. A prefix may also be split: its head is loaded, its tail is
computed, where the tail lies in a slower tier or would arrive too late.

    found     | device |     host     |     storage     |  never found …
    loaded              |<---- num_blocks ---->|
    computed                                   |<------ recompute ------
"""

from dataclasses import dataclass
from typing import NamedTuple

from headwater.types import LinkRate


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """What the loop measured lately. None is unknown, and then worth finding out."""

    prefill_tokens_s: float | None = None
    """Prompt tokens computed in a second."""

    host: LinkRate | None = None
    """From host to device."""

    storage: LinkRate | None = None
    """From storage to host."""


class LowerTierMatch(NamedTuple):
    """Blocks below the device, in position order: first those on the host."""

    host: int = 0
    storage: int = 0

    @property
    def num_blocks(self) -> int:
        return self.host + self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDecision:
    """How many of the blocks found below the device are loaded, and what that was based on."""

    num_blocks: int
    """Leading ones; 0 is to compute them all."""

    reason: str
    load_s: float | None = None
    """Expected seconds until they, or all where none is loaded, are on the device; None where
    nothing was measured."""

    recompute_s: float | None = None
    """Expected seconds to compute all of them instead."""

    chosen_s: float | None = None
    """Expected seconds of what was chosen: to load these and to compute the rest."""


def choose(
    found: LowerTierMatch,
    *,
    rates: MeasuredRates,
    queued: LowerTierMatch,
    block_tokens: int,
    max_wait_s: float,
) -> LoadDecision:
    """The cheapest leading part to load. `queued` are blocks that the links bring before.

    Nothing longer than `max_wait_s` is loaded. What was never measured is loaded, because
    that is how it gets measured.
    """
    total = found.num_blocks
    compute_s = None
    if rates.prefill_tokens_s:
        compute_s = block_tokens / rates.prefill_tokens_s
    if compute_s is None:
        return LoadDecision(num_blocks=total, reason="unmeasured")
    costs = {}
    for count in sorted({0, found.host, total, _within(max_wait_s, found, rates, queued)}):
        wait_s = load_s(count, found, rates, queued)
        if wait_s <= max_wait_s:
            costs[count] = wait_s + (total - count) * compute_s
    best = min(costs, key=lambda count: (costs[count], -count))
    reason = "recompute_cheaper" if best == 0 else "load_cheaper" if best == total else "split"
    return LoadDecision(
        num_blocks=best,
        reason=reason,
        load_s=load_s(best or total, found, rates, queued),
        recompute_s=total * compute_s,
        chosen_s=costs[best],
    )


def load_s(
    count: int, found: LowerTierMatch, rates: MeasuredRates, queued: LowerTierMatch
) -> float:
    """Expected seconds until the first `count` blocks below the device are on it.

    Those in storage come to the host first, and then all of them to the device. A link that
    was never measured costs nothing here.
    """
    if not count:
        return 0.0
    seconds = 0.0
    stored = count - found.host
    if stored > 0 and rates.storage is not None:
        latency_s, block_s = rates.storage
        seconds += latency_s + (queued.storage + stored) * block_s
    if rates.host is not None:
        latency_s, block_s = rates.host
        seconds += latency_s + (queued.host + count) * block_s
    return seconds


def _within(
    max_wait_s: float, found: LowerTierMatch, rates: MeasuredRates, queued: LowerTierMatch
) -> int:
    """The most blocks that are on the device within `max_wait_s`."""
    least, most = 0, found.num_blocks
    while least < most:
        middle = (least + most + 1) // 2
        if load_s(middle, found, rates, queued) <= max_wait_s:
            least = middle
        else:
            most = middle - 1
    return least
