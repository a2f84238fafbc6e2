"""Host memory for blocks, and the copiers between it and the device."""

from typing import TYPE_CHECKING

from headwater.clock import Clock
from headwater.engine.core import Runner
from headwater.launch.kept_host import KeptHost
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.slab import HostSlab

if TYPE_CHECKING:
    from headwater.device.kv import KVPool
    from headwater.device.parallel.copier import RankCopies


class HostMemory:
    """Makes slabs and copiers for an engine with one or several ranks."""

    def __init__(
        self,
        pool: "KVPool",
        runner: Runner,
        clock: Clock,
        copies: "RankCopies | None" = None,
        kept: KeptHost | None = None,
    ) -> None:
        """`copies` collects the copies of the other ranks, if there are any. `kept` is the memory
        of the host tier that the supervisor owns, if there is any."""
        self.kept = kept
        self.pool = pool
        self.block_bytes = pool.block_bytes
        self.copies = copies
        self._runner = runner
        self._clock = clock

    @property
    def has_ranks(self) -> bool:
        """Whether other ranks copy their own parts of a block."""
        return self.copies is not None

    def slab(self, num_slots: int) -> HostSlab:
        """Memory for whole blocks."""
        return HostSlab(num_slots, self.block_bytes, for_ranks=self.has_ranks)

    def kept_slab(self, num_slots: int) -> HostSlab:
        """Memory for whole blocks that outlives this engine if the supervisor provides it;
        otherwise that of `slab`."""
        if self.kept is None:
            return self.slab(num_slots)
        return self.kept.open_slab(num_slots, self.block_bytes)

    def open_copier(self, slab: HostSlab, *, for_links: bool = False) -> DeviceCopier:
        """A copier between the device and `slab`: the host tier, or staging buffers
        `for_links`. The copier of the host tier tells the runner which layers have arrived."""
        # Imported here: torch is already imported when a pool exists.
        from headwater.device.open import open_copier

        runner = None if for_links else self._runner
        own = open_copier(
            self.pool,
            slab,
            self._clock,
            runner,
            for_links=for_links,
            makes_pages=not for_links,  # here only: other ranks map the same memory
        )
        return own if self.copies is None else self.copies.open(own, slab)
