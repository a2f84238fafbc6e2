"""Hit and miss counters: prompt tokens by the tier they were found in, and miss reasons.

Counters only; the reader computes ratios. A match is counted when it is leased, once per
request: probes and resumed sequences are not counted again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.cache.plan import Match, MissReason
from headwater.types import Tier


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
    """The running totals; `record` is called once per request."""

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
