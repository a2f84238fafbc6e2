"""Attention kernels of Headwater and of FlashInfer, on the same pages of KV.

Shapes are those of Llama-3.1-8B in bfloat16. FlashInfer is measured if it can be imported: each
variant of it separately, and the ratio is that of its fastest one. It compiles its kernels in
the first call of a variant, which takes minutes on a new machine and is reported separately. A
cell or a variant that fails is reported with its error, and the others are measured.
"""

import importlib
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.bench._gpu_ceilings import time_ms
from headwater.bench._gpu_engine import BLOCK_TOKENS, DEVICE
from headwater.clock import SystemClock
from headwater.device.attention.base import Variant
from headwater.device.gpu.work import num_entries, split_contexts, tiles
from headwater.device.kernels.decode import attend_decodes
from headwater.device.kernels.pieces import DecodeWork
from headwater.device.kernels.prefill import attend_chunks, has_hopper_kernel, takes_pairs
from headwater.device.kernels.tiles import ChunkWork, tile_queries

HEADS, KV_HEADS, DIM = 32, 8, 128
DTYPE = torch.bfloat16

DECODES = ((1, 1024), (1, 32768), (32, 1024), (128, 1024), (256, 1024), (32, 8192), (128, 8192))
"""Rows, and tokens in the context of each."""

PREFILLS = ((2048, 0), (8192, 0), (32768, 0), (512, 16384), (2048, 32768), (64, 32768))
"""Queries of one prompt, and the tokens before them that are cached."""

_VARIANTS = {"decode": ("tensor_cores", "cuda_cores"), "prefill": ("fa3", "fa2")}
_CALLS = 8
"""Calls of a kernel in the graph that is timed, so that the launch of the graph weighs little."""

_WORKSPACE_BYTES = 256 << 20
_MAX_ERROR_CHARS = 300

Attend = Callable[[], Tensor]
"""Attends once, and returns `[queries, heads, dim]`."""


class Cell(NamedTuple):
    """One step of attention: every row has the same number of queries and tokens."""

    kind: str
    rows: int
    queries: int
    context: int
    """Tokens of a row, its queries included."""

    @property
    def name(self) -> str:
        if self.kind == "decode":
            return f"decode_{self.rows}x{self.context}"
        return f"prefill_{self.queries}_after_{self.context - self.queries}"

    @property
    def width(self) -> int:
        """Blocks of a row."""
        return -(-self.context // BLOCK_TOKENS)

    def rate(self, ms: float) -> dict[str, float]:
        """The rate that limits the step: bytes of KV per second for a decode, operations per
        second for a prompt."""
        if self.kind == "decode":
            kv_bytes = self.rows * self.context * KV_HEADS * DIM * 2 * DTYPE.itemsize
            return {"gb_s": kv_bytes / ms / 1e6}
        seen = self.queries * (self.context - self.queries / 2)
        return {"tflop_s": 4 * HEADS * DIM * seen / ms / 1e9}


class Pages(NamedTuple):
    """KV of a cell in shuffled blocks, and its queries."""

    pool: Tensor
    table: np.ndarray
    """Blocks of all rows, one after another."""

    packed: Tensor
    """`[queries, heads and KV heads * dim]`, as the decoder leaves Q, K and V."""


def measure_kernels(*, is_quick: bool) -> dict[str, Any]:
    """Time of every cell; with FlashInfer, also its times and the ratio of its best to ours."""
    flashinfer, missing = _flashinfer()
    found: dict[str, Any] = {"flashinfer": getattr(flashinfer, "__version__", missing)}
    compile_s: dict[str, float] = {}
    cells = _cells(is_quick=is_quick)
    for cell in cells:
        try:
            found[cell.name] = _measure(cell, flashinfer, compile_s)
        except Exception as exc:  # noqa: BLE001 -- reported, and the other cells are measured
            traceback.print_exc()
            found[cell.name] = {"error": _shown(exc)}
        torch.cuda.empty_cache()
    found["flashinfer_first_call_s"] = compile_s
    found["failed"] = [cell.name for cell in cells if "error" in found[cell.name]]
    ratios = [found[cell.name]["ratio"] for cell in cells if "ratio" in found[cell.name]]
    if ratios:
        found["lowest_ratio"] = min(ratios)
    return found


def _flashinfer() -> tuple[ModuleType | None, str]:
    """The package, or None and why it is not measured."""
    try:
        return importlib.import_module("flashinfer"), ""
    except Exception as exc:  # noqa: BLE001 -- it may also fail to load its libraries
        return None, f"skipped: {_shown(exc)}"


def _cells(*, is_quick: bool) -> list[Cell]:
    decodes = [Cell("decode", rows, 1, context) for rows, context in DECODES]
    prefills = [Cell("prefill", 1, count, cached + count) for count, cached in PREFILLS]
    return (
        [decodes[0], decodes[3], prefills[0], prefills[-1]] if is_quick else decodes + prefills
    )


def _measure(
    cell: Cell,
    flashinfer: ModuleType | None,
    compile_s: dict[str, float],
) -> dict[str, Any]:
    pages = _pages(cell)
    ours = _our_decode(cell, pages) if cell.kind == "decode" else _our_prefill(cell, pages)
    expected = ours().float()
    ours_ms = _graph_ms(ours)
    found: dict[str, Any] = {"ours_ms": ours_ms, **cell.rate(ours_ms)}
    if flashinfer is None:
        return found
    for variant in _VARIANTS[cell.kind]:
        try:
            found |= _measure_variant(cell, pages, flashinfer, variant, expected, compile_s)
        except Exception as exc:  # noqa: BLE001 -- the other variant may work
            torch.cuda.synchronize()
            found[f"{variant}_error"] = _shown(exc)
    best = _best(found, _VARIANTS[cell.kind])
    return found if best is None else found | {"ratio": best / ours_ms}


def _measure_variant(
    cell: Cell,
    pages: Pages,
    flashinfer: ModuleType,
    variant: str,
    expected: Tensor,
    compile_s: dict[str, float],
) -> dict[str, float]:
    clock = SystemClock()
    began_s = clock.now()
    plan = _their_decode if cell.kind == "decode" else _their_prefill
    theirs = plan(cell, pages, flashinfer, variant)
    result = theirs().float()
    torch.cuda.synchronize()
    compile_s.setdefault(variant, clock.now() - began_s)
    return {
        f"{variant}_ms": _graph_ms(theirs),
        f"{variant}_difference": float((result - expected).norm() / expected.norm()),
    }


def _best(found: Mapping[str, Any], variants: tuple[str, ...]) -> float | None:
    times = [found[f"{name}_ms"] for name in variants if f"{name}_ms" in found]
    return min(times, default=None)


def _graph_ms(attend: Attend) -> float:
    """Time of one call in a graph of several."""
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            attend()
    return time_ms(graph.replay, 9) / _CALLS


def _pages(cell: Cell) -> Pages:
    blocks = cell.rows * cell.width
    shape = blocks, 1, 2, BLOCK_TOKENS, KV_HEADS, DIM
    pool = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
    table = np.random.default_rng(7).permutation(blocks)
    size = (HEADS + 2 * KV_HEADS) * DIM
    packed = torch.randn((cell.rows * cell.queries, size), device=DEVICE).to(DTYPE)
    return Pages(pool, table, packed)


def _ints(values: Any) -> Tensor:  # noqa: ANN401 -- any numbers
    return torch.from_numpy(np.asarray(values).astype(np.int32)).to(DEVICE)


def _our_decode(cell: Cell, pages: Pages) -> Attend:
    contexts = np.full(cell.rows, cell.context)
    pieces = split_contexts(contexts, cell.rows, KV_HEADS)
    entries = num_entries(cell.rows, KV_HEADS)
    work = DecodeWork(
        contexts=_ints(contexts),
        tables=_ints(pages.table),
        table_start=_ints(np.arange(cell.rows) * cell.width),
        piece=_ints([pieces.piece]),
        work_row=_ints(pieces.work_row),
        work_start=_ints(pieces.work_start),
        row_work=_ints(pieces.row_work),
        arrived=torch.zeros((cell.rows, KV_HEADS), dtype=torch.int32, device=DEVICE),
        partial=torch.empty((entries, HEADS, DIM), device=DEVICE),
        partial_lse=torch.empty((entries, HEADS), device=DEVICE),
    )
    out = torch.empty((cell.rows, HEADS, DIM), device=DEVICE, dtype=DTYPE)
    variant = Variant(DIM**-0.5)

    def attend() -> Tensor:
        attend_decodes(pages.packed, pages.pool, 0, work, variant, out)
        return out

    return attend


def _our_prefill(cell: Cell, pages: Pages) -> Attend:
    tile = tile_queries(DTYPE, DIM, cell.queries)
    shared = tiles(
        np.array([cell.queries]),
        np.array([cell.context]),
        first_row=0,
        tile=tile,
        heads=HEADS,
        has_hopper_kernel=has_hopper_kernel(pages.pool),
        has_pairs=takes_pairs(pages.pool, HEADS, tile),
    )
    shape = len(shared.row), shared.num_parts, tile, HEADS
    has_parts = shared.num_parts > 1
    work = ChunkWork(
        contexts=_ints([cell.context]),
        query_start=_ints([0, cell.queries]),
        tables=_ints(pages.table),
        table_start=_ints([0]),
        tile=tile,
        tile_row=_ints(shared.row),
        tile_start=_ints(shared.start),
        longest_context=cell.context,
        use_hopper=shared.use_hopper,
        num_parts=shared.num_parts,
        part_keys=_ints(shared.part_keys),
        partial=torch.empty((*shape, DIM) if has_parts else 1, device=DEVICE),
        partial_lse=torch.empty(shape if has_parts else 1, device=DEVICE),
    )
    out = torch.empty((cell.queries, HEADS, DIM), device=DEVICE, dtype=DTYPE)
    variant = Variant(DIM**-0.5)

    def attend() -> Tensor:
        attend_chunks(pages.packed, pages.pool, 0, work, variant, out)
        return out

    return attend


def _their_decode(
    cell: Cell,
    pages: Pages,
    flashinfer: ModuleType,
    variant: str,
) -> Attend:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=variant == "tensor_cores"
    )
    wrapper.plan(
        *_their_pages(cell, pages),
        HEADS,
        KV_HEADS,
        DIM,
        BLOCK_TOKENS,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    return _their_call(wrapper, pages)


def _their_prefill(
    cell: Cell,
    pages: Pages,
    flashinfer: ModuleType,
    variant: str,
) -> Attend:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(), "NHD", backend=variant
    )
    wrapper.plan(
        _ints([0, cell.queries]),
        *_their_pages(cell, pages),
        HEADS,
        KV_HEADS,
        DIM,
        BLOCK_TOKENS,
        causal=True,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    return _their_call(wrapper, pages)


def _workspace() -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)


def _their_pages(cell: Cell, pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row's pages begin, the pages, and the tokens in each row's last page."""
    in_last = (cell.context - 1) % BLOCK_TOKENS + 1
    starts = np.arange(cell.rows + 1) * cell.width
    return _ints(starts), _ints(pages.table), _ints(np.full(cell.rows, in_last))


def _their_call(wrapper: Any, pages: Pages) -> Attend:  # noqa: ANN401 -- one of its classes
    query = pages.packed[:, : HEADS * DIM].reshape(-1, HEADS, DIM).contiguous()
    kv = pages.pool[:, 0]
    return lambda: wrapper.run(query, kv)


def _shown(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:_MAX_ERROR_CHARS]
