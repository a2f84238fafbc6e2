"""Attention of prompt chunks compiled from `prefill.c`, for a pool in float32 on a CPU.

All chunks of a step are one call per layer. It reads the blocks in place and uses the threads
that torch is allowed to use, like the compiled matrix products. `ChunkRow` computes the same in
torch: for other pools and variants, and without a compiler.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.attention.chunk import ChunkRow
from headwater.device.kv import KVPool
from headwater.native.compiler import open_library

_SOURCE = Path(__file__).with_name("prefill.c")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Chunks(ctypes.Structure):
    """`Chunks` of the C source."""

    _fields_ = (
        *((name, _P) for name in ("query", "pool", "out", "starts", "counts", "firsts")),
        *((name, _P) for name in ("tables", "slots", "items")),
        *((name, _I) for name in ("num_items", "query_stride", "layer", "layers")),
        *((name, _I) for name in ("block_tokens", "kv_heads", "group", "dim")),
        ("scaling", ctypes.c_float),
    )


class PrefillKernel:
    """The compiled function and its limits."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name in ("item_lanes", "widest_head", "head_step"):
            getattr(library, name).restype = _I
        self.item_lanes: int = library.item_lanes()
        """Queries of one KV head that are computed together."""

        self._widest: int = library.widest_head()
        self._step: int = library.head_step()
        self.attend = library.attend_chunks
        self.attend.argtypes, self.attend.restype = (_P,), None

    def fits(self, head_dim: int) -> bool:
        """Whether heads of this size can be attended."""
        return head_dim <= self._widest and head_dim % self._step == 0


class PrefillStep:
    """The chunks of one step. Their K and V are in the pool before `attend`."""

    def __init__(self, kernel: PrefillKernel, pool: KVPool, rows: Sequence[ChunkRow]) -> None:
        self._kernel, self._pool = kernel, pool
        self._context = max(row.context for row in rows)
        sizes = [(row.start, row.end - row.start, row.first) for row in rows]
        self._sizes = torch.tensor(sizes).T.contiguous()
        lengths = [len(row.slots) for row in rows]
        self._tables = torch.from_numpy(np.cumsum([0, *lengths[:-1]]))
        self._slots = torch.cat([row.slots for row in rows])
        self._items: Tensor | None = None

    def can_attend(self, variant: Variant) -> bool:
        """Whether all queries see all tokens before them, without soft-caps or sinks."""
        sees_all = variant.window is None or variant.window >= self._context
        return variant.has_plain_scores and sees_all

    def attend(self, layer: int, query: Tensor, out: Tensor, scaling: float) -> None:
        """Set the chunks' tokens in `out`; both are `[tokens, heads, head_dim]`."""
        pool = self._pool
        heads, dim = query.shape[1:]
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        group = heads // pool.kv_heads
        items = self._parts(group)
        chunks = _Chunks(
            *(query.data_ptr(), pool.data.data_ptr(), out.data_ptr()),
            *(part.data_ptr() for part in self._sizes),
            *(self._tables.data_ptr(), self._slots.data_ptr(), items.data_ptr()),
            *(len(items), query.stride(0), layer, pool.num_layers),
            *(pool.block_tokens, pool.kv_heads, group, dim),
            scaling,
        )
        self._kernel.attend(ctypes.byref(chunks))

    def _parts(self, group: int) -> Tensor:
        """Row and first lane of each part of a row; the same for all layers."""
        if self._items is None:
            lanes = (self._sizes[1] * group).tolist()
            step = self._kernel.item_lanes
            parts = [(row, at) for row, end in enumerate(lanes) for at in range(0, end, step)]
            self._items = torch.tensor(parts)
        return self._items


def prefill_step(pool: KVPool, rows: Sequence[ChunkRow]) -> PrefillStep | None:
    """Compiled attention of these rows; None if there is none for them."""
    kernel = kernel_for(pool) if rows else None
    return None if kernel is None else PrefillStep(kernel, pool, rows)


def kernel_for(pool: KVPool) -> PrefillKernel | None:
    """The compiled attention if it can read the blocks of `pool`."""
    is_plain = pool.device.type == "cpu" and pool.data.dtype == torch.float32
    if not is_plain or pool.planes == 1 or pool.value_dim != pool.head_dim:
        return None
    kernel = load_kernel()
    return kernel if kernel is not None and kernel.fits(pool.head_dim) else None


@cache
def load_kernel() -> PrefillKernel | None:
    """The compiled attention; compiled now if necessary. None if that fails."""
    library = open_library(_SOURCE, _FLAGS, "attention of prompts runs in torch, more slowly")
    return None if library is None else PrefillKernel(library)
