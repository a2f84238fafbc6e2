"""The collectives of the ranks of one engine: torch.distributed with gloo or NCCL.

All ranks call the same collectives in the same order, because all run the same steps. If a rank
is gone, a gloo call raises an error. If a rank hangs, every rank waits, until the engine's step
watchdog ends the engine.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from headwater.device.parallel.share import RankShare

_TIMEOUT = timedelta(hours=1)
"""Timeout of one collective. It is longer than the engine's step timeout, which normally ends
first."""


class RankGroup:
    """One rank's end of the group. All ranks call every method."""

    def __init__(
        self, share: RankShare, *, backend: str, store: Path, device: torch.device | None = None
    ) -> None:
        """Join the other ranks through the file `store`. `backend` is `gloo` or `nccl`; NCCL
        needs a separate `device` for each rank."""
        self.rank, self.size = share.rank, share.size
        self.can_capture = backend == "nccl"
        """Whether collectives may be part of a captured graph."""
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # The ranks of an engine are on one machine. Without this, gloo would listen on its
            # host name.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            store=FileStore(str(store), share.size),
            rank=share.rank,
            world_size=share.size,
            timeout=_TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in place if it is contiguous."""
        whole = x.contiguous()
        dist.all_reduce(whole)
        return whole

    def join_columns(self, x: Tensor, total: int) -> Tensor:
        """The ranks' parts of the last dimension side by side, `total` wide. On CPUs only rank
        0 has the result."""
        if x.device.type == "cuda" and not self.can_capture:
            return self._sum_columns(x, total)
        width = -(-total // self.size)
        # parts differ by at most one element, but gloo needs equal sizes
        if x.shape[-1] < width:
            x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        if x.device.type == "cuda":
            parts = x.new_empty((self.size, *x.shape))
            dist.all_gather_into_tensor(parts, x.contiguous())
            return self._cut(list(parts), total)
        pieces = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x.contiguous(), pieces, dst=0)
        return x if pieces is None else self._cut(pieces, total)

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Whether the condition is true on every rank."""
        flag = torch.full((1,), int(is_so), dtype=torch.int32, device=device)
        return int(self.sum(flag)) == self.size

    def copy_from_first(self, x: Tensor) -> None:
        """Overwrite `x` with that of rank 0."""
        dist.broadcast(x, src=0)

    def close(self) -> None:
        """Leave the group. Waits for no rank."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _sum_columns(self, x: Tensor, total: int) -> Tensor:
        """Join columns by a sum: each rank adds zeros outside its own part. gloo has no other
        collective for GPU memory."""
        start, end = RankShare(rank=self.rank, size=self.size).part(total)
        whole = x.new_zeros((*x.shape[:-1], total))
        whole[..., start:end] = x
        return self.sum(whole)

    def _cut(self, parts: list[Tensor], total: int) -> Tensor:
        shares = (RankShare(rank=rank, size=self.size) for rank in range(self.size))
        widths = (share.part(total) for share in shares)
        pairs = zip(parts, widths, strict=True)
        return torch.cat([part[..., : end - start] for part, (start, end) in pairs], dim=-1)
