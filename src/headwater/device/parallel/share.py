"""The part of a model on one rank, calculated from head counts.

    8 query heads, 4 KV heads, 2 ranks      rank 0: q 0-3, kv 0-1     rank 1: q 4-7, kv 2-3
    8 query heads, 2 KV heads, 4 ranks      rank 0: q 0-1, kv 0       rank 1: q 2-3, kv 0   …

With fewer KV heads than ranks, each KV head is on several ranks.
"""

from dataclasses import dataclass

from headwater.errors import ConfigError

Range = tuple[int, int]
"""Start and end of a half-open range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The part of a model on rank `rank` of `size` ranks."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, total: int) -> Range:
        """This rank's part of `total` rows or columns; parts differ by at most one."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def heads(self, heads: int) -> Range:
        """This rank's query heads; raises ConfigError if they cannot be split evenly."""
        if heads % self.size:
            raise ConfigError(
                f"--tensor-parallel-size {self.size} does not divide the model's {heads} "
                "attention heads; choose a size that does"
            )
        return self.part(heads)

    def kv_heads(self, kv_heads: int) -> Range:
        """This rank's KV heads. Several ranks share one if there are fewer KV heads than
        ranks."""
        if kv_heads % self.size == 0:
            return self.part(kv_heads)
        if self.size % kv_heads == 0:
            head = self.rank // (self.size // kv_heads)
            return head, head + 1
        raise ConfigError(
            f"--tensor-parallel-size {self.size}: the model's {kv_heads} KV heads can be "
            "neither split nor repeated evenly; choose a size that divides them or is a multiple"
        )

    def copies(self, kv_heads: int) -> int:
        """Number of ranks that have each KV head."""
        return max(1, self.size // kv_heads)

    def writes_kv(self, kv_heads: int) -> bool:
        """Whether this rank writes its KV heads to lower tiers; only one of the ranks with the
        same heads does."""
        return self.rank % self.copies(kv_heads) == 0
