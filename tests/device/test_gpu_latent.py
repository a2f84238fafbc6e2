"""Kernels over latent KV against float64 on random input; outputs are poisoned before."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from tests.device.gpu import DEVICE, HALF, pytestmark, require_kernels

require_kernels()

from headwater.device.gpu.work import split_contexts, tiles  # noqa: E402 - Triton below
from headwater.device.kernels.decode import attend_decodes  # noqa: E402
from headwater.device.kernels.latent import rotate_queries, store_latents  # noqa: E402
from headwater.device.kernels.pieces import DecodeWork  # noqa: E402
from headwater.device.kernels.prefill import attend_chunks  # noqa: E402
from headwater.device.kernels.rotary import RotaryPairs  # noqa: E402
from headwater.device.kernels.tiles import ChunkWork, tile_queries  # noqa: E402

__all__ = ["pytestmark"]

NAN, LAYER, SCALING, PLAIN = float("nan"), 1, 0.1, 12
SHAPES = [(4, 32, 8, 4), (20, 64, 16, 16), (16, 512, 64, 64), (128, 512, 64, 16)]
"""Heads, latent size, rotated size, block tokens."""

ALLOWED = {torch.float32: 1e-5, HALF: 1e-2}


def ints(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32)).to(DEVICE)


class Rows:
    """Contexts in shuffled slots of a random pool."""

    def __init__(
        self, shape: tuple[int, int, int, int], contexts: list[int], dtype: torch.dtype
    ):
        self.heads, self.latent, rotated, block_tokens = shape
        self.size = self.latent + rotated
        widths = [-(-n // block_tokens) for n in contexts]
        num_blocks = sum(widths) + 3
        shape_of_pool = (num_blocks, 2, 1, block_tokens, 1, self.size)
        self.pool = torch.randn(shape_of_pool, dtype=dtype, device=DEVICE)
        order = np.random.default_rng(1).permutation(num_blocks)
        self.starts = np.cumsum([0, *widths])
        self.slots = order[: self.starts[-1]]
        self.contexts = contexts

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


@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_in_one_piece_and_in_many(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Rows of all lengths are right; unused rows are not changed."""
    rows = Rows(shape, [1, 700, 33, 192, 3000], dtype)
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
    query = torch.randn(num_rows, rows.heads, rows.size, dtype=dtype, device=DEVICE)
    out = torch.full((num_rows, rows.heads, rows.latent), NAN, dtype=dtype, device=DEVICE)

    attend_decodes(query.view(num_rows, -1), rows.pool, LAYER, work, Variant(SCALING), out)

    for row in range(len(rows.contexts)):
        assert error(out[row], rows.exact(row, query[row : row + 1])[0]) < ALLOWED[dtype]


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("dtype", list(ALLOWED))
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_chunks_whole_and_in_parts(
    shape: tuple[int, int, int, int], dtype: torch.dtype, num_parts: int
) -> None:
    """Causal attention of chunks is right, with and without a prefix."""
    counts, contexts = np.array([5, 130, 64]), np.array([5, 700, 64])
    rows = Rows(shape, contexts.tolist(), dtype)
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
    query = torch.randn(num_tokens, rows.heads, rows.size, dtype=dtype, device=DEVICE)
    out = torch.full((num_tokens, rows.heads, rows.latent), NAN, dtype=dtype, device=DEVICE)

    attend_chunks(query.view(num_tokens, -1), rows.pool, LAYER, work, Variant(SCALING), out)

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


def rotated_by(x: Tensor, table: tuple[Tensor, Tensor], at: int, pairs: RotaryPairs) -> Tensor:
    half = x.shape[-1] // 2
    left, right = (x[..., :half], x[..., half:]) if not pairs else (x[..., 0::2], x[..., 1::2])
    cosine, sine = table[0][at], table[1][at]
    both = left * cosine - right * sine, right * cosine + left * sine
    if pairs is RotaryPairs.NEIGHBOURS:
        return torch.stack(both, dim=-1).flatten(-2)
    return torch.cat(both, dim=-1)
