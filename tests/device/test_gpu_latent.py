"""Kernels over latent KV against float64 on random input; outputs are poisoned before."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from headwater.device.fp8_kv import Fp8KVPool
from headwater.device.kv import KVPool
from headwater.device.model import load
from tests.device.gpu import DEVICE, HALF, IS_INTERPRETED, pytestmark, require_kernels
from tests.device.pool_shape import PoolShape

require_kernels()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from headwater.device.gpu.fp8_latents import differences, latent_fault  # noqa: E402 - as below
from headwater.device.gpu.work import split_contexts, tiles  # noqa: E402 - Triton below
from headwater.device.kernels import latent_fp8  # noqa: E402
from headwater.device.kernels.decode import attend_decodes  # noqa: E402
from headwater.device.kernels.latent_store import rotate_queries, store_latents  # noqa: E402
from headwater.device.kernels.pieces import DecodeWork  # noqa: E402
from headwater.device.kernels.prefill import attend_chunks  # noqa: E402
from headwater.device.kernels.rotary import RotaryPairs  # noqa: E402
from headwater.device.kernels.tiles import ChunkWork, tile_queries  # noqa: E402

__all__ = ["pytestmark"]

NAN, LAYER, SCALING, PLAIN = float("nan"), 1, 0.1, 12
SHAPES = [
    (4, 32, 8, 4),
    (20, 64, 16, 16),
    (16, 512, 64, 64),
    (128, 512, 64, 16),
    (40, 64, 32, 32),
]
"""Heads, latent size, rotated size, block tokens."""

ALLOWED = {torch.float32: 1e-5, HALF: 1e-2}


@triton.jit
def plain_halves(pairs):
    """`e4m3_halves` without PTX, which the interpreter does not have."""
    low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@pytest.fixture(autouse=True)
def interpreted_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the kernel over pairs runs too."""
    if IS_INTERPRETED:
        monkeypatch.setattr(latent_fp8, "e4m3_halves", plain_halves)
        monkeypatch.setattr(latent_fp8, "_converts", lambda device: True)


def fp8_pool(num_blocks: int, block_tokens: int, size: int, dtype: torch.dtype) -> Fp8KVPool:
    """An empty pool of latents in 8 bits, with two layers."""
    model: Any = PoolShape(2, 1, size, dtype=dtype, device=DEVICE, has_fp8_kv=True)
    model.planes = 1
    return Fp8KVPool(model, num_blocks=num_blocks, block_tokens=block_tokens)


def ints(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32)).to(DEVICE)


class Rows:
    """Contexts in shuffled slots of a random pool."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        contexts: list[int],
        dtype: torch.dtype,
        *,
        is_fp8: bool = False,
    ):
        """In 8 bits, latents differ in size, and the blocks around them are NaN."""
        self.heads, self.latent, rotated, block_tokens = shape
        self.size = self.latent + rotated
        widths = [-(-n // block_tokens) for n in contexts]
        num_blocks = sum(widths) + 3
        shape_of_pool = (num_blocks, 2, 1, block_tokens, 1, self.size)
        self.pool = torch.randn(shape_of_pool, dtype=dtype, device=DEVICE)
        self.stored = self.pool
        order = np.random.default_rng(1).permutation(num_blocks)
        self.starts = np.cumsum([0, *widths])
        self.slots = order[: self.starts[-1]]
        self.contexts = contexts
        if is_fp8:
            self.pool *= torch.exp(2 * torch.randn(*shape_of_pool[:-1], 1, device=DEVICE))
            pool = fp8_pool(num_blocks, block_tokens, self.size, dtype)
            pool.blocks.fill_(0x7F)
            tokens = len(self.slots) * block_tokens
            slots = np.repeat(self.slots, block_tokens)
            rows = pool.rows_of(slots, np.arange(tokens) % block_tokens)[LAYER]
            latents = self.pool[self.slots, LAYER].reshape(tokens, 1, self.size)
            pool.write(rows, torch.arange(tokens, device=DEVICE), latents, latents)
            self.pool[self.slots, LAYER] = pool.rounded(self.pool[self.slots, LAYER])
            self.stored = pool.data

    def queries(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Random queries. They are smaller where latents differ in size, because the rounding
        errors of scores of thousands are larger than what is allowed."""
        size = 0.02 if self.stored is not self.pool else 1.0
        shape = (num_tokens, self.heads, self.size)
        return (size * torch.randn(shape, device=DEVICE)).to(dtype)

    def keys(self, row: int) -> Tensor:
        mine = self.slots[self.starts[row] : self.starts[row + 1]]
        return self.pool[mine, LAYER, 0, :, 0].reshape(-1, self.size)[: self.contexts[row]]

    def exact(self, row: int, query: Tensor) -> Tensor:
        """Attention of the last tokens of a row, `[tokens, heads, size]`."""
        keys = self.keys(row).double()
        scores = torch.einsum("qhd,kd->hqk", query.double(), keys) * SCALING
        count, context = len(query), self.contexts[row]
        at = torch.arange(context - count, context, device=DEVICE)
        hidden = torch.arange(context, device=DEVICE) > at[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, keys[:, : self.latent])


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_in_one_piece_and_in_many(
    shape: tuple[int, int, int, int], dtype: torch.dtype, is_fp8: bool
) -> None:
    """Rows of all lengths are right, over 8-bit KV too; unused rows are not changed."""
    rows = Rows(shape, [1, 700, 33, 192, 3000], dtype, is_fp8=is_fp8)
    num_rows = len(rows.contexts) + 2
    pieces = split_contexts(np.array(rows.contexts, dtype=np.int64), num_rows, 1)
    absent = [0] * (num_rows - len(rows.contexts))
    entries = len(pieces.work_row)
    work = DecodeWork(
        contexts=ints([*rows.contexts, *absent]),
        tables=ints(rows.slots),
        table_start=ints([*rows.starts[:-1], *absent]),
        piece=ints([pieces.piece]),
        work_row=ints(pieces.work_row),
        work_start=ints(pieces.work_start),
        row_work=ints(pieces.row_work),
        arrived=ints(np.zeros((num_rows, 1))),
        partial=torch.full((entries, rows.heads, rows.size), NAN, device=DEVICE),
        partial_lse=torch.full((entries, rows.heads), NAN, device=DEVICE),
    )
    query = rows.queries(num_rows, dtype)
    out = torch.full((num_rows, rows.heads, rows.latent), NAN, dtype=dtype, device=DEVICE)

    attend_decodes(query.view(num_rows, -1), rows.stored, LAYER, work, Variant(SCALING), out)

    for row in range(len(rows.contexts)):
        assert error(out[row], rows.exact(row, query[row : row + 1])[0]) < ALLOWED[dtype]


@pytest.mark.parametrize(("shape", "fits"), list(zip(SHAPES, (0, 0, 1, 0, 1), strict=True)))
def test_pairs_are_read_where_blocks_and_sizes_allow_it(
    shape: tuple[int, int, int, int], fits: int
) -> None:
    """16-bit queries over 8-bit latents, with tiles that are not longer than a block."""
    heads, latent, rotated, block_tokens = shape
    pool = fp8_pool(2, block_tokens, latent + rotated, HALF).data
    query = torch.empty((1, heads * (latent + rotated)), dtype=HALF, device=DEVICE)

    assert latent_fp8.fits(query, pool, latent) is bool(fits)
    assert not latent_fp8.fits(query.float(), pool, latent)
    assert not latent_fp8.fits(query, pool.to(HALF), latent)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_chunks_whole_and_in_parts(
    shape: tuple[int, int, int, int], dtype: torch.dtype, num_parts: int, is_fp8: bool
) -> None:
    """Causal attention of chunks is right, with and without a prefix, over 8-bit KV too."""
    counts, contexts = np.array([5, 130, 64]), np.array([5, 700, 64])
    rows = Rows(shape, contexts.tolist(), dtype, is_fp8=is_fp8)
    tile = tile_queries(dtype, rows.size, 130)
    made = tiles(
        counts, contexts, first_row=0, tile=tile, heads=rows.heads, has_hopper_kernel=False
    )
    entries = len(made.row) * num_parts * tile
    work = ChunkWork(
        contexts=ints(contexts),
        query_start=ints(np.cumsum([0, *counts])),
        tables=ints(rows.slots),
        table_start=ints(rows.starts[:-1]),
        tile=tile,
        tile_row=ints(made.row),
        tile_start=ints(made.start),
        longest_context=700,
        num_parts=num_parts,
        part_keys=ints((-(-contexts // (num_parts * 64)) * 64)[made.row]),
        partial=torch.full((entries, rows.heads, rows.size), NAN, device=DEVICE),
        partial_lse=torch.full((entries, rows.heads), NAN, device=DEVICE),
    )
    num_tokens = int(counts.sum())
    query = rows.queries(num_tokens, dtype)
    out = torch.full((num_tokens, rows.heads, rows.latent), NAN, dtype=dtype, device=DEVICE)

    attend_chunks(query.view(num_tokens, -1), rows.stored, LAYER, work, Variant(SCALING), out)

    for row, end in enumerate(np.cumsum(counts)):
        mine = slice(int(end - counts[row]), int(end))
        assert error(out[mine], rows.exact(row, query[mine])) < ALLOWED[dtype]


@pytest.mark.parametrize("pairs", list(RotaryPairs))
def test_latents_are_normed_rotated_and_stored(pairs: RotaryPairs) -> None:
    """Stored latents are right for each order of rotated elements; a token without a slot is
    not stored."""
    heads, latent, rotated, block_tokens = SHAPES[1]
    size, half = latent + rotated, rotated // 2
    tokens = 7
    packed = torch.randn(tokens, heads * (PLAIN + rotated) + size, device=DEVICE)
    plain, stored = packed.tensor_split((heads * (PLAIN + rotated),), dim=1)
    angles = torch.randn(64, half, device=DEVICE)
    table = angles.cos(), angles.sin()
    positions, slots = ints([3, 9, 1, 0, 20, 6, 2]), ints([1, 2, 3, -1, 5, 6, 7])
    weight = torch.randn(latent, device=DEVICE)
    pool = torch.zeros(9, 2, 1, block_tokens, 1, size, device=DEVICE)
    query = torch.zeros(tokens, heads, size, device=DEVICE)

    store_latents(stored, positions, slots, (weight, 1e-6), table, pool, LAYER, pairs)
    rotate_queries(plain, positions, table, query, pairs)

    expected = torch.zeros_like(pool)
    for token, (slot, at) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot >= 0:
            place = expected[slot, LAYER, 0, at % block_tokens, 0]
            place[:latent] = torch.rms_norm(stored[token, :latent], [latent], weight, 1e-6)
            place[latent:] = rotated_by(stored[token, latent:], table, at, pairs)
        own = plain[token].view(heads, -1)[:, PLAIN:]
        assert torch.allclose(
            query[token, :, latent:], rotated_by(own, table, at, pairs), atol=1e-5
        )
    assert torch.allclose(pool, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("pairs", list(RotaryPairs))
def test_latents_are_stored_in_8_bits_as_a_cpu_stores_them(
    pairs: RotaryPairs, dtype: torch.dtype
) -> None:
    """A token has one scale for its latent and its rotated part, also if its elements are very
    small or zero. Nothing else is written."""
    _, latent, rotated, block_tokens = SHAPES[1]
    size, tokens = latent + rotated, 3 * block_tokens - 5
    stored = torch.randn(tokens, size, device=DEVICE)
    stored *= torch.exp(2 * torch.randn(tokens, 1, device=DEVICE))
    stored[1], stored[2, :latent], stored[3] = 0.0, 0.0, stored[3] * 1e-6
    stored = stored.to(dtype)
    angles = torch.randn(64, rotated // 2, device=DEVICE)
    table = angles.cos(), angles.sin()
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    slots = 3 - positions // block_tokens
    slots[4] = -1
    norm = torch.rand(latent, device=DEVICE).to(dtype), 1e-6
    plain = torch.zeros(5, 2, 1, block_tokens, 1, size, dtype=dtype, device=DEVICE)
    pool = fp8_pool(5, block_tokens, size, dtype)
    expected = fp8_pool(5, block_tokens, size, dtype)

    store_latents(stored, positions, slots.int(), norm, table, pool.data, LAYER, pairs)

    store_latents(stored, positions, slots.int(), norm, table, plain, LAYER, pairs)
    live = torch.where(slots >= 0)[0]
    rows = expected.rows_of(slots[live].cpu().numpy(), live.cpu().numpy() % block_tokens)
    latents = plain[slots[live], LAYER, 0, live % block_tokens]
    expected.write(rows[LAYER], torch.arange(len(live), device=DEVICE), latents, latents)
    if IS_INTERPRETED:
        # The interpreter rounds ties up, and rounds numbers below a power of two or of the
        # smallest exponent wrongly.
        steps = (pool.blocks.int() - expected.blocks.int()).abs()
        is_known = (expected.blocks & 7 > 0) & (expected.blocks & 0x78 > 0)
        assert int(steps[is_known].max()) <= 1
        assert float((steps[is_known] > 0).float().mean()) < 0.02
    else:
        assert torch.equal(pool.blocks, expected.blocks)


def rotated_by(x: Tensor, table: tuple[Tensor, Tensor], at: int, pairs: RotaryPairs) -> Tensor:
    half = x.shape[-1] // 2
    left, right = (x[..., :half], x[..., half:]) if not pairs else (x[..., 0::2], x[..., 1::2])
    cosine, sine = table[0][at], table[1][at]
    both = left * cosine - right * sine, right * cosine + left * sine
    if pairs is RotaryPairs.NEIGHBOURS:
        return torch.stack(both, dim=-1).flatten(-2)
    return torch.cat(both, dim=-1)


class WrongHeads(Fp8KVPool):
    """A pool whose content should be twice as large as it is."""

    def rounded(self, heads: Tensor) -> Tensor:
        return super().rounded(heads) * 2


def test_a_fault_of_kernels_over_8_bit_latents_is_found(family: Any) -> None:
    """Storing and attending agree with a pool in the model's dtype, a wrong number is a
    difference, and a kernel that does not run is a fault."""
    model = load(family("deepseek_v3"), device=DEVICE.type)
    sizes: dict[str, Any] = {"num_blocks": 13, "block_tokens": 16}
    layer = replace(model, num_layers=1)
    eight, plain = replace(layer, has_fp8_kv=True), KVPool(layer, **sizes)

    stored, *attended = differences(Fp8KVPool(eight, **sizes), plain, 4)
    assert max(attended) < 1e-5
    assert stored < (0.1 if IS_INTERPRETED else 1e-3)  # the interpreter rounds some wrongly
    # The pool has half of what it should have: exactly 0.5 apart if storing is exact.
    wrong = differences(WrongHeads(eight, **sizes), plain, 4)[0]
    assert wrong == pytest.approx(0.5, abs=0.1)
    assert latent_fault(replace(model, head_dim=33), 16) is not None
