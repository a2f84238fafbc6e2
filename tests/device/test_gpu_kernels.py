"""Every kernel against float64 on random input; its output is poisoned before."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.attention.base import Variant
from tests.device.gpu import DEVICE, HALF, IS_INTERPRETED, pytestmark, require_kernels

require_kernels()

from headwater.device.gpu.work import num_entries, split_contexts, tiles  # noqa: E402 - Triton below
from headwater.device.kernels import decode_tma, rows  # noqa: E402
from headwater.device.kernels.activation import GateActivation  # noqa: E402
from headwater.device.kernels.decode import attend_decodes  # noqa: E402
from headwater.device.kernels.gated import gate_up  # noqa: E402
from headwater.device.kernels.gemv import gemv  # noqa: E402
from headwater.device.kernels.greedy import choose_greedy  # noqa: E402
from headwater.device.kernels.logit_edits import SamplingInputs  # noqa: E402
from headwater.device.kernels.pieces import DecodeWork  # noqa: E402
from headwater.device.kernels.prefill import attend_chunks, has_hopper_kernel  # noqa: E402
from headwater.device.kernels.rotary import HeadNorms, RotaryPairs, rotate  # noqa: E402
from headwater.device.kernels.sampling import SamplingScratch, choose_sampled  # noqa: E402
from headwater.device.kernels.tiles import ChunkWork, tile_queries  # noqa: E402

__all__ = ["pytestmark"]

NAN = float("nan")
LAYER = 1
SHAPES = [(32, 8, 128, 64), (8, 4, 32, 16), (6, 2, 80, 16), (16, 8, 64, 1), (8, 2, 256, 64)]
"""Heads, KV heads, head size, block tokens."""

VARIANTS: dict[str, Callable[[int, float], Variant]] = {
    "plain": lambda heads, scaling: Variant(scaling),
    "window": lambda heads, scaling: Variant(scaling, window=37),
    "softcap": lambda heads, scaling: Variant(scaling, softcap=5.0),
    "sinks": lambda heads, scaling: Variant(scaling, sinks=torch.randn(heads, device=DEVICE)),
}
CHUNKS = (([1, 40, 130, 300], [30, 40, 700, 1300]), ([9, 30], [2100, 33]))
MANY_CHUNKS = (
    ([1, 40, 130, 300], [30, 40, 700, 1300]),
    ([128], [128]),
    ([256, 129, 127], [256, 1000, 127]),
    ([200, 512], [2049, 704]),
    ([700, 900], [700, 900]),
)
ALLOWED = {torch.float32: 1e-5, HALF: 1e-2, torch.float16: 2e-3}


def ints(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32)).to(DEVICE)


def error(ours: Tensor, exact: Tensor) -> float:
    """Relative error; NaN if something was not written."""
    return float((ours.double() - exact).norm() / exact.norm())


def gated(both: Tensor) -> Tensor:
    """`silu(gate) * up` of rows with gate and up interleaved."""
    return torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]


def attended(
    query: Tensor, keys: Tensor, values: Tensor, first: int, variant: Variant
) -> Tensor:
    """Attention in float64: `[tokens, heads, dim]` over `[context, kv_heads, dim]`."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = torch.einsum("thd,nhd->htn", query.double(), keys) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    at = first + torch.arange(len(query), device=DEVICE)[:, None]
    key = torch.arange(len(keys), device=DEVICE)
    hidden = key > at
    if variant.window is not None:
        hidden |= key <= at - variant.window
    scores = scores.masked_fill(hidden, -math.inf)
    if variant.sinks is not None:
        column = variant.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("htn,nhd->thd", weights, values)


class Pool:
    """A pool of random KV, and rows whose tables are shuffled over it."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.dim, self.block_tokens = shape
        num_blocks = max(64, 2600 // self.block_tokens)
        self.data = torch.randn(
            (num_blocks, 2, 2, self.block_tokens, self.kv_heads, self.dim), device=DEVICE
        ).to(dtype)
        self._random = np.random.default_rng()

    def tables(self, contexts: list[int]) -> list[np.ndarray]:
        wanted = [-(-context // self.block_tokens) for context in contexts]
        return [self._random.permutation(len(self.data))[:n] for n in wanted]

    def own_tables(self, contexts: list[int]) -> list[np.ndarray]:
        """Tables that share nothing; NaN after each context, left by an earlier sequence."""
        widths = [-(-context // self.block_tokens) for context in contexts]
        slots = self._random.permutation(sum(widths))
        tables = np.split(slots, np.cumsum(widths)[:-1])
        shape = len(slots), 2, 2, *self.data.shape[3:]
        self.data = torch.randn(shape, device=DEVICE).to(self.data.dtype)
        for table, context in zip(tables, contexts, strict=True):
            self.data[int(table[-1]), :, :, (context - 1) % self.block_tokens + 1 :] = NAN
        return tables

    def packed(self, tokens: int) -> Tensor:
        width = (self.heads + 2 * self.kv_heads) * self.dim
        return torch.randn((tokens, width), device=DEVICE).to(self.data.dtype)

    def exact(
        self, packed: Tensor, table: np.ndarray, context: int, variant: Variant
    ) -> Tensor:
        query = packed[:, : self.heads * self.dim].view(len(packed), self.heads, self.dim)
        blocks = self.data[torch.from_numpy(table).to(DEVICE), LAYER]
        keys, values = (
            blocks[:, plane].reshape(-1, self.kv_heads, self.dim)[:context] for plane in (0, 1)
        )
        return attended(query, keys, values, context - len(packed), variant)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("variant_name", list(VARIANTS))
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes(
    shape: tuple[int, int, int, int], variant_name: str, dtype: torch.dtype
) -> None:
    """Attention of rows of all lengths, including unused ones, is right, whole and in
    pieces."""
    pool = Pool(shape, dtype)
    variant = VARIANTS[variant_name](pool.heads, pool.dim**-0.5)
    contexts = [1, pool.block_tokens, pool.block_tokens + 1, 700, 2049, 5]
    tables = pool.tables(contexts)
    widths = [len(table) for table in tables]
    for size in (len(contexts), len(contexts) + 3):
        pieces = split_contexts(np.array(contexts), size, pool.kv_heads)
        entries = num_entries(size, pool.kv_heads)
        work = DecodeWork(
            contexts=ints([*contexts, *[0] * (size - len(contexts))]),
            tables=ints(np.concatenate(tables)),
            table_start=ints(np.append(np.cumsum(widths) - widths, [0] * 3)[:size]),
            piece=ints([pieces.piece]),
            work_row=ints(pieces.work_row),
            work_start=ints(pieces.work_start),
            row_work=ints(pieces.row_work),
            arrived=torch.zeros((size, pool.kv_heads), dtype=torch.int32, device=DEVICE),
            partial=torch.full((entries, pool.heads, pool.dim), NAN, device=DEVICE),
            partial_lse=torch.full((entries, pool.heads), NAN, device=DEVICE),
        )
        packed = pool.packed(size)
        out = torch.full((size, pool.heads, pool.dim), NAN, device=DEVICE, dtype=dtype)

        attend_decodes(packed, pool.data, LAYER, work, variant, out)

        for row, context in enumerate(contexts):
            exact = pool.exact(packed[row : row + 1], tables[row], context, variant)
            assert error(out[row : row + 1], exact) < ALLOWED[dtype], f"row {row}"
        assert not work.arrived.any()


@pytest.mark.parametrize("num_rows", [5, 80])
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 128, 64), (16, 8, 64, 64), (8, 8, 64, 128), (32, 2, 128, 64), (24, 2, 64, 64)],
)
@pytest.mark.parametrize("variant_name", ["plain", "window"])
def test_decodes_of_whole_tiles(
    shape: tuple[int, int, int, int], variant_name: str, num_rows: int
) -> None:
    """Results are right with heads alone, together, and with 12 or 16 queries for each, with
    few rows and many, and in every layer with the same counters. NaN after a row's context, left by an earlier owner of the
    block, changes nothing."""
    pool = Pool(shape, HALF)
    variant = VARIANTS[variant_name](pool.heads, pool.dim**-0.5)
    random = np.random.default_rng()
    contexts = [*random.integers(1, 1200, num_rows - 1).tolist(), 2048]
    tables = pool.own_tables(contexts)
    widths = [len(table) for table in tables]
    pieces = split_contexts(np.array(contexts), num_rows, pool.kv_heads)
    entries = num_entries(num_rows, pool.kv_heads)
    work = DecodeWork(
        contexts=ints(contexts),
        tables=ints(np.concatenate(tables)),
        table_start=ints(np.cumsum(widths) - widths),
        piece=ints([pieces.piece]),
        work_row=ints(pieces.work_row),
        work_start=ints(pieces.work_start),
        row_work=ints(pieces.row_work),
        arrived=torch.zeros((num_rows, pool.kv_heads), dtype=torch.int32, device=DEVICE),
        partial=torch.full((entries, pool.heads, pool.dim), NAN, device=DEVICE),
        partial_lse=torch.full((entries, pool.heads), NAN, device=DEVICE),
    )
    for _ in range(3):
        packed = pool.packed(num_rows)
        out = torch.full((num_rows, pool.heads, pool.dim), NAN, device=DEVICE, dtype=HALF)

        attend_decodes(packed, pool.data, LAYER, work, variant, out)

        for row, context in enumerate(contexts):
            exact = pool.exact(packed[row : row + 1], tables[row], context, variant)
            assert error(out[row : row + 1], exact) < 1e-2, f"row {row} of {context}"
        assert not work.arrived.any()


@pytest.mark.parametrize(("heads", "fits"), [(16, True), (18, False), (32, False)])
def test_products_with_more_than_8_queries_are_left_to_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, heads: int, fits: bool
) -> None:
    """Triton compiles them with other instructions, whose results were wrong on an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    pool = Pool((heads, 2, 128, 64), HALF)
    out = torch.empty((5, heads, 128), dtype=HALF, device=DEVICE)

    assert decode_tma.fits(pool.data, Variant(0.1), out) is fits


def chunk_work(
    pool: Pool, counts: list[int], contexts: list[int], tables: list[np.ndarray]
) -> ChunkWork:
    """Tiles of a step without a kernel for many tiles."""
    widths = [len(table) for table in tables]
    tile = tile_queries(pool.data.dtype, pool.dim, max(counts))
    shared = tiles(
        np.array(counts), np.array(contexts), first_row=0, tile=tile, heads=pool.heads,
        has_hopper_kernel=False,
    )  # fmt: skip
    rows_wanted = (len(shared.row), shared.num_parts, tile, pool.heads)
    return ChunkWork(
        contexts=ints(contexts),
        query_start=ints(np.cumsum([0, *counts])),
        tables=ints(np.concatenate(tables)),
        table_start=ints(np.cumsum(widths) - widths),
        tile=tile,
        tile_row=ints(shared.row),
        tile_start=ints(shared.start),
        longest_context=max(contexts),
        num_parts=shared.num_parts,
        part_keys=ints(shared.part_keys),
        partial=torch.full((*rows_wanted, pool.dim), NAN, device=DEVICE),
        partial_lse=torch.full(rows_wanted, NAN, device=DEVICE),
    )


def check_chunks(
    pool: Pool, work: ChunkWork, tables: list[np.ndarray], variant: Variant
) -> None:
    """Every row of `work` attended, against float64."""
    starts, contexts = work.query_start.tolist(), work.contexts.tolist()
    packed = pool.packed(starts[-1])
    shape = starts[-1], pool.heads, pool.dim
    out = torch.full(shape, NAN, device=DEVICE, dtype=pool.data.dtype)

    attend_chunks(packed, pool.data, LAYER, work, variant, out)

    for row, context in enumerate(contexts):
        mine = slice(starts[row], starts[row + 1])
        exact = pool.exact(packed[mine], tables[row], context, variant)
        assert error(out[mine], exact) < ALLOWED[pool.data.dtype], f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("variant_name", list(VARIANTS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", CHUNKS, ids=("mixed", "short"))
def test_chunks(
    shape: tuple[int, int, int, int],
    variant_name: str,
    dtype: torch.dtype,
    chunks: tuple[list[int], list[int]],
) -> None:
    """Results are right for chunks with and without a prefix, of one token and of many, in one
    batch; and for few queries over long contexts, whose keys are cut into parts."""
    pool = Pool(shape, dtype)
    variant = VARIANTS[variant_name](pool.heads, pool.dim**-0.5)
    tables = pool.tables(chunks[1])
    check_chunks(pool, chunk_work(pool, *chunks, tables), tables, variant)


@pytest.mark.parametrize("dtype", [HALF, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 128, 64), (16, 8, 64, 64), (8, 8, 64, 128), (4, 1, 128, 192), (18, 6, 64, 64)],
)
def test_many_chunks(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The Hopper kernel for many tiles is right with all heads at a time, some, or one KV head
    after another; with up to four items per program; and at every position where a tile of
    keys, a page of the pool or a row may end."""
    pool = Pool(shape, dtype)
    if not has_hopper_kernel(pool.data):
        pytest.skip("for Hopper, and a version of Triton it is known to work with")
    for counts, contexts in MANY_CHUNKS:
        for longest in (1, 1 << 15, 1 << 20):
            tables = pool.own_tables(contexts)
            work = chunk_work(pool, counts, contexts, tables)
            work.use_hopper, work.longest_context = True, longest
            for _ in range(2):
                check_chunks(pool, work, tables, Variant(pool.dim**-0.5))


@pytest.mark.parametrize("normed", ["never", "first", "last"])
@pytest.mark.parametrize("pairs", [RotaryPairs.HALVES, RotaryPairs.NEIGHBOURS])
@pytest.mark.parametrize("rotated", [32, 20, 2])
def test_the_rotary_kernel_stores_the_rotated_keys(
    normed: str, pairs: RotaryPairs, rotated: int
) -> None:
    """Q and K are rotated in place. K and V are written to their slots of the pool and to no
    others; a token with slot -1 is not stored."""
    heads, kv_heads, dim, block = 4, 2, 32, 8
    packed = torch.randn(5, (heads + 2 * kv_heads) * dim, device=DEVICE)
    positions, slots = ints([0, 5, 8, 17, 3]), ints([3, 2, 7, -1, 9])
    angles = torch.randn(40, rotated // 2, device=DEVICE)
    weights = torch.rand(dim, device=DEVICE), torch.rand(dim, device=DEVICE)
    norms = HeadNorms(*weights, 1e-5, is_last=normed == "last")
    pool = torch.zeros(20, 3, 2, block, kv_heads, dim, device=DEVICE)
    ours = packed.clone()

    table = angles.cos(), angles.sin()
    rotate(
        ours, positions, slots, table, pool, LAYER, None if normed == "never" else norms, pairs
    )

    split = packed.view(5, -1, dim).clone()
    turned = split[:, : heads + kv_heads]

    def normalise() -> None:
        turned[:, :heads] = torch.rms_norm(turned[:, :heads], [dim], norms.query, 1e-5)
        turned[:, heads:] = torch.rms_norm(turned[:, heads:], [dim], norms.key, 1e-5)

    if normed == "first":
        normalise()
    cosine, sine = (part[positions.long()][:, None] for part in table)
    if pairs is RotaryPairs.HALVES:
        first, second = turned[..., : rotated // 2], turned[..., rotated // 2 : rotated]
    else:
        first, second = turned[..., 0:rotated:2], turned[..., 1:rotated:2]
    both = first * cosine - second * sine, second * cosine + first * sine
    first.copy_(both[0])
    second.copy_(both[1])
    if normed == "last":
        normalise()
    assert error(ours.view(5, -1, dim), split.double()) < 1e-6
    for token, (slot, at) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot >= 0:
            stored = pool[slot, LAYER, :, at % block].reshape(-1, dim)
            assert torch.allclose(stored, split[token, heads:], atol=1e-5)
    assert int((pool != 0).sum()) == 4 * 2 * kv_heads * dim


def test_rows_of_activations() -> None:
    """Embedding with carried tokens, norm and gate are right at sizes that are not powers of
    two."""
    table = torch.randn(30, 48, device=DEVICE)
    tokens, carry, chosen = ints([3, 0, 5]), ints([-1, 1, -1]), ints([9, 7])
    assert torch.equal(rows.embed(tokens, carry, chosen, table), table[[3, 7, 5]])
    x, weight = torch.randn(3, 96, device=DEVICE), torch.randn(96, device=DEVICE)
    exact = torch.rms_norm(x.double(), [96], weight.double(), 1e-5)
    assert error(rows.norm(x, weight, 1e-5), exact) < 1e-6
    assert error(rows.gate(x), gated(x.double())) < 1e-6
    for bias in (None, torch.randn(96, device=DEVICE)):
        biased = x.double() if bias is None else x.double() + bias
        for activation, exact in (
            (GateActivation.SQUARED_RELU, biased.relu().square()),
            (GateActivation.GELU_TANH, torch.nn.functional.gelu(biased, approximate="tanh")),
        ):
            assert error(rows.activate_rows(x.clone(), bias, activation), exact) < 1e-5


@pytest.mark.parametrize("outputs", [32, 1500, 66000])
@pytest.mark.parametrize("size", [64, 2048, 2880])
def test_products_of_one_row(size: int, outputs: int) -> None:
    """Products are right with a norm before them, and with a gate, a bias, a residual or
    nothing after them; also if the last tile of inputs is incomplete."""
    if IS_INTERPRETED and outputs * size > 1 << 22:
        pytest.skip("takes minutes in the interpreter")
    x, scale = padded(torch.randn(2, size, device=DEVICE).to(HALF))
    x, scale = x[None], scale.abs()
    weight = padded(torch.randn(outputs, size, device=DEVICE).to(HALF))
    bias, start = torch.randn(2, outputs, device=DEVICE).to(HALF)
    residual = start[None].clone()
    normed = torch.rms_norm(x.double(), [size], scale.double(), 1e-5) @ weight.double().T
    plain = (x.double() @ weight.double().T + bias.double()) * 0.5 + start.double()

    assert error(gemv(x, weight, norm=(scale, 1e-5)), normed) < 1e-2
    assert error(gemv(x, weight, bias=bias, norm=(scale, 1e-5)), normed + bias.double()) < 1e-2
    both = gemv(x, weight, norm=(scale, 1e-5), gated=True)
    assert error(both, gated(normed)) < 1e-2
    assert error(gemv(x, weight, bias=bias, residual=residual, factor=0.5), plain) < 1e-2


def padded(values: Tensor) -> Tensor:
    """The same values, with NaN before and after them in memory."""
    around = torch.full(
        (values.numel() + 8192,), float("nan"), dtype=values.dtype, device=DEVICE
    )
    around[4096:-4096] = values.flatten()
    return around[4096:-4096].view(values.shape)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 30, 47, 48, 64, 120, 128, 250, 2190])
def test_gate_and_up(num_rows: int) -> None:
    """Every row and no other is written: transposed or not, in one kernel or in two, depending
    on the number of rows."""
    x = torch.randn(num_rows, 512, device=DEVICE).bfloat16()
    weight = torch.randn(1536, 512, device=DEVICE).bfloat16()
    exact = gated(x.double() @ weight.double().T)

    for is_eager in (False, True):
        assert error(gate_up(x, weight, is_eager=is_eager), exact) < 1e-2


def test_greedy_choice_is_the_first_of_the_largest_numbers() -> None:
    """The first of the largest logits is chosen with ties, infinities and rows without a
    number, in both dtypes (lesson 58)."""
    for dtype in (torch.float32, HALF):
        logits = torch.randn(6, 5000, device=DEVICE).to(dtype)
        logits[1, [7, 4000]] = 50.0
        logits[2, 30], logits[2, 31] = NAN, math.inf
        logits[3] = NAN
        logits[4] = -math.inf
        chosen = torch.full((8,), -1, dtype=torch.int32, device=DEVICE)

        choose_greedy(logits, chosen)

        usable = torch.where(logits.isfinite(), logits, -math.inf)
        assert chosen[[0, 2, 5]].tolist() == usable[[0, 2, 5]].argmax(-1).tolist()
        assert chosen[[1, 3, 4]].tolist() == [7, 0, 0]
        assert chosen[6:].tolist() == [-1, -1]


def test_rows_that_are_not_sampled_have_no_edits() -> None:
    """The host sends flags for all rows, and ranges of edits only for sampled ones. The other
    rows still have old ranges, which may reach beyond the end of the edits: the kernel must not
    read them."""
    rows, vocab = 3, 40
    scratch = SamplingScratch(rows, vocab, DEVICE)
    scratch.edited.fill_(7.0)
    zeros = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    floats = torch.zeros(rows, device=DEVICE)
    inputs = SamplingInputs(
        flags=zeros,
        top_k=zeros,
        state=zeros - 1,
        edit_start=zeros,
        edit_end=zeros + 4,
        temperature=floats,
        top_p=floats,
        min_p=floats,
        uniform=floats,
        repetition=floats,
        presence=floats,
        frequency=floats,
        edit_ids=ints(range(4)),
        edit_amounts=torch.ones(4, device=DEVICE),
        mask=zeros - 1,
        masks=torch.zeros((rows, 2), dtype=torch.int32, device=DEVICE),
        counts=torch.zeros((rows, vocab), dtype=torch.int16, device=DEVICE),
    )
    logits = torch.randn(rows, vocab, device=DEVICE).to(HALF)

    choose_sampled(logits, zeros.clone(), inputs, scratch, rows)

    assert (scratch.edited == 7.0).all()
