"""Compiled attention of prompt chunks gives the results of torch, for any sizes."""

import subprocess
from typing import cast

import pytest
import torch
from torch import Tensor

from headwater.device.attention import prefill, sdpa
from headwater.device.attention.base import Variant
from headwater.device.attention.chunk import ChunkRow
from headwater.device.attention.prefill import PrefillStep, load_kernel, prefill_step
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.native import compiler
from tests.device.driver import Driver
from tests.device.families import prompt
from tests.device.pool_shape import PoolShape

LAYERS, LAYER = 3, 1
PLAIN = Variant(0.1)


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pool_of(
    *, kv_heads: int = 2, dim: int = 16, block_tokens: int = 4, num_blocks: int = 64
) -> KVPool:
    """A pool full of numbers."""
    shape = PoolShape(LAYERS, kv_heads, dim, dtype=torch.float32, device=torch.device("cpu"))
    pool = KVPool(cast(LoadedModel, shape), num_blocks=num_blocks, block_tokens=block_tokens)
    pool.data.copy_(made(*pool.data.shape))
    return pool


def rows_of(pool: KVPool, *sizes: tuple[int, int]) -> list[ChunkRow]:
    """Packed rows of these tokens after these cached ones, each in its own slots."""
    rows, start = [], 0
    free = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(1))
    for tokens, before in sizes:
        slots, free = free.tensor_split((-(-(tokens + before) // pool.block_tokens),))
        row = ChunkRow(start=start, end=start + tokens, context=tokens + before, slots=slots)
        rows.append(row)
        start = row.end
    return rows


def compiled(pool: KVPool, rows: list[ChunkRow], query: Tensor) -> Tensor:
    step = prefill_step(pool, rows)
    assert step is not None, "the tests need a C compiler"
    out = torch.full(query.shape, float("nan"))
    step.attend(LAYER, query, out, PLAIN.scaling)
    return out


def in_torch(pool: KVPool, rows: list[ChunkRow], query: Tensor) -> Tensor:
    """What torch's fused kernel computes, from K and V as the pool stores them."""
    parts = []
    for row in rows:
        keys, values = (x[: row.context, None] for x in pool.read(row.slots, LAYER))
        part = torch.nn.functional.scaled_dot_product_attention(
            query[row.start : row.end, None].transpose(0, 2).transpose(0, 1),
            keys.permute(1, 2, 0, 3),
            values.permute(1, 2, 0, 3),
            attn_mask=torch.ones(row.end - row.start, row.context).tril(row.first).bool(),
            scale=PLAIN.scaling,
            enable_gqa=True,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("dim", [2, 8, 64, 128, 256])
@pytest.mark.parametrize("block_tokens", [1, 12, 64])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_attention_equals_torch(dim: int, block_tokens: int, group: int) -> None:
    """Results equal those of torch for rows of one token and of many, with and without a
    prefix, in scattered blocks."""
    pool = pool_of(dim=dim, block_tokens=block_tokens, num_blocks=600)
    rows = rows_of(pool, (1, 40), (33, 0), (5, 64), (90, 31), (1, 0))
    query = made(rows[-1].end, 2 * group + 4, dim)[:, : 2 * group]

    ours = compiled(pool, rows, query)

    torch.testing.assert_close(ours, in_torch(pool, rows, query), rtol=1e-4, atol=1e-5)


def test_distant_scores_neither_overflow_nor_vanish() -> None:
    """The largest score is far from the others, and comes late."""
    pool = pool_of()
    pool.data *= 12
    rows = rows_of(pool, (40, 50))
    query = made(40, 4, 16) * 24

    ours = compiled(pool, rows, query)

    torch.testing.assert_close(ours, in_torch(pool, rows, query), rtol=1e-4, atol=1e-4)


def test_hidden_tokens_have_no_influence() -> None:
    """What a block holds after a query's own token does not change a bit of its result."""
    pool = pool_of(block_tokens=16)
    rows = rows_of(pool, (3, 20))
    query = made(3, 4, 16)
    ours = compiled(pool, rows, query)

    pool.data[rows[0].slots[1], LAYER, :, 23 - 16 :] = 1e30

    assert torch.equal(compiled(pool, rows, query), ours)


def test_a_token_does_not_depend_on_its_chunk_or_its_step() -> None:
    """A result has the same bits in one chunk, in two, and beside other rows: cached equals
    uncached."""
    pool = pool_of(block_tokens=16)
    (whole,) = rows_of(pool, (70, 13))
    query = made(70, 6, 16)
    first = ChunkRow(start=0, end=25, context=38, slots=whole.slots[:3])
    rest = ChunkRow(start=25, end=70, context=83, slots=whole.slots)

    together = compiled(pool, [whole], query)

    assert torch.equal(compiled(pool, [first, rest], query), together)


def test_threads_do_not_change_a_result() -> None:
    """Parts of rows are divided among threads; each query belongs to one of them."""
    pool = pool_of(num_blocks=200)
    rows = rows_of(pool, (150, 200), (7, 3), (60, 90))
    query = made(rows[-1].end, 8, 16)
    alone = compiled(pool, rows, query)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(compiled(pool, rows, query), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("variant", "can"),
    [
        (PLAIN, True),
        (PLAIN._replace(window=30), True),
        (PLAIN._replace(window=29), False),
        (PLAIN._replace(softcap=20.0), False),
        (PLAIN._replace(sinks=torch.zeros(4)), False),
    ],
)
def test_other_variants_are_left_to_torch(variant: Variant, can: bool) -> None:
    """A window that hides nothing is computed by the compiled attention, too."""
    pool = pool_of()
    step = prefill_step(pool, rows_of(pool, (10, 20)))

    assert step is not None
    assert step.can_attend(variant) is can


@pytest.mark.parametrize("dim", [5, 258])
def test_other_pools_are_left_to_torch(dim: int) -> None:
    """The compiled attention knows heads of up to 256 numbers, if that number is even."""
    pool = pool_of(dim=dim)

    assert prefill_step(pool, rows_of(pool, (3, 0))) is None


def test_generated_tokens_are_those_of_torch(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding after chunks over prefixes, in mixed steps, gives the same tokens."""
    attended: list[PrefillStep] = []
    attend = PrefillStep.attend

    def seen(self: PrefillStep, *given: object) -> None:
        attended.append(self)
        attend(self, *given)  # type: ignore[arg-type]  # passed on

    def answers() -> list[list[int]]:
        driver = Driver(llama, block_tokens=8)
        old, new = (
            driver.add(prompt(45), name="old"),
            driver.add(prompt(61, seed=1), name="new"),
        )
        driver.step((old, 20))
        driver.step((old, 25), (new, 33))
        driver.finish(old, new, count=12)
        return [old.output, new.output]

    monkeypatch.setattr(PrefillStep, "attend", seen)
    ours = answers()
    assert attended
    monkeypatch.setattr(sdpa, "prefill_step", lambda *_: None)

    assert answers() == ours


def test_a_machine_without_a_compiler_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The missing compiler is logged, and chunks are attended in torch."""

    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(compiler, "compile_library", fails)
    kernel = load_kernel.__wrapped__()
    monkeypatch.setattr(prefill, "load_kernel", lambda: kernel)
    pool = pool_of()

    assert prefill_step(pool, rows_of(pool, (3, 0))) is None
    assert "more slowly" in caplog.text
