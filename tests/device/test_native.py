"""The compiled operations give the results of torch. Where they cannot be used, torch is
used."""

from pathlib import Path

import pytest
import torch

from headwater.device import native
from headwater.device.attention.base import Variant
from headwater.device.attention.chunk import ChunkRow
from headwater.device.host_ops import HostOps, TorchOps, host_ops
from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel
from headwater.device.spans import SpanLengths


@pytest.fixture(scope="module")
def compiled() -> native.NativeOps:
    ops = native.load()
    assert ops is not None, "the tests need a C compiler"
    return ops


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 96), (7, 768)])
def test_norms_agree(compiled: native.NativeOps, shape: tuple[int, ...]) -> None:
    """Norms equal those of torch for any number of rows, contiguous or not."""
    x, weight = made(*shape), made(shape[-1], seed=1)

    ours = compiled.rms_norm(x, weight, 1e-5)

    torch.testing.assert_close(ours, TorchOps().rms_norm(x, weight, 1e-5))
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(compiled.rms_norm(turned, weight, 1e-5), ours)


@pytest.mark.parametrize("dim", [2, 64, 96])
def test_rotation_agrees_and_leaves_other_heads_alone(
    compiled: native.NativeOps, dim: int
) -> None:
    """Heads are rotated in place, among others that are not."""
    tokens = made(5, 6, dim)
    angles = made(5, dim // 2, seed=2).repeat(1, 2)
    expected = TorchOps().rotate(tokens[:, :4].clone(), angles.cos(), angles.sin())
    others = tokens[:, 4:].clone()

    ours = compiled.rotate(tokens[:, :4], angles.cos(), angles.sin())

    torch.testing.assert_close(ours, expected)
    assert torch.equal(tokens[:, 4:], others)


@pytest.mark.parametrize("strided", [True, False])
def test_scattered_rows_agree(compiled: native.NativeOps, strided: bool) -> None:
    """Pieces of chosen tokens go to their rows, and no other row is touched."""
    source = made(6, 5, 4)[:, 2:4] if strided else made(2, 6, 4).transpose(0, 1)
    tokens, rows = torch.tensor([5, 0, 3]), torch.tensor([7, 1, 0, 9, 4, 2])
    ours, theirs = torch.full((10, 4), 3.0), torch.full((10, 4), 3.0)

    compiled.scatter(source, tokens, rows, ours)
    TorchOps().scatter(source, tokens, rows, theirs)

    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dim", [8, 64, 128, 256, 320])
def test_attention_over_buffers_equals_torch(compiled: native.NativeOps, dim: int) -> None:
    """Attention equals that of torch for every size, in buffers of different lengths within
    longer ones; nothing is left unset."""
    spans = SpanLengths(torch.tensor([4, 1, 7]), width=7, kv_heads=2)
    query, keys, values = made(6, 3, dim), made(6, 9, dim, seed=1), made(6, 9, dim, seed=2)

    def attended(ops: HostOps) -> torch.Tensor:
        scores = torch.full((6, 3, 12), float("nan"))
        scores[..., :5] = float("-inf")
        ops.own_scores(query, keys[:, 1:8], spans, scores[..., 5:])
        return ops.own_values(scores.softmax(-1)[..., 5:], values[:, 1:8], spans)

    torch.testing.assert_close(attended(compiled), attended(TorchOps()))


@pytest.mark.parametrize("spread", [1.0, 40.0])
def test_a_softmax_over_two_parts_agrees(compiled: native.NativeOps, spread: float) -> None:
    """The softmax equals that of torch for any distance between scores; missing tokens have no
    weight."""
    spans = SpanLengths(torch.tensor([4, 1, 7]), width=7, kv_heads=2)
    shared, own = made(2, 9, 33) * spread, made(6, 3, 7, seed=1) * spread
    mask = spans.mask(torch.float32)
    assert mask is not None
    own += mask
    theirs = shared.clone(), own.clone()

    compiled.join_softmax(shared, own, spans)
    TorchOps().join_softmax(*theirs, spans)

    torch.testing.assert_close(shared, theirs[0])
    torch.testing.assert_close(own, theirs[1])


@pytest.mark.parametrize("seen", [1, 6])
def test_causal_softmax_equals_torch(compiled: native.NativeOps, seen: int) -> None:
    """Each query sees one key more than the query before; hidden keys have no weight."""
    ours = made(2, 3, 5, seen + 4)
    theirs = ours.clone()

    compiled.causal_softmax(ours, seen)
    TorchOps().causal_softmax(theirs, seen)

    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("tokens", "before"), [(15, 8), (16, 8), (70, 0), (129, 20)])
def test_a_prompt_in_parts_equals_the_fused_kernel(
    llama: LoadedModel, tokens: int, before: int
) -> None:
    """Causal attention is the same in parts, with and without a prefix in the pool."""
    pool = KVPool(llama, num_blocks=(tokens + before) // 4 + 1, block_tokens=4)
    pool.data.copy_(made(*pool.data.shape))
    slots = torch.arange(pool.num_blocks).flip(0)
    query = made(tokens, 2 * pool.kv_heads, pool.head_dim)
    keys, values = (part[: tokens + before].clone() for part in pool.read(slots, 0))
    row = ChunkRow(start=0, end=tokens, context=tokens + before, slots=slots)

    ours = row.attend(pool, 0, query, (keys, values), Variant(0.5))

    theirs = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=torch.ones(tokens, tokens + before, dtype=torch.bool).tril(before),
        scale=0.5,
        enable_gqa=True,
    )
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))


def test_without_a_compiler_torch_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine logs why it is slower, and continues."""
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    host_ops.cache_clear()
    try:
        assert isinstance(host_ops(torch.device("cpu"), torch.float32), TorchOps)
    finally:
        host_ops.cache_clear()
    assert "no-such-compiler" in caplog.text


def test_other_dtypes_are_left_to_torch() -> None:
    """The compiled operations know float32 only."""
    assert isinstance(host_ops(torch.device("cpu"), torch.bfloat16), TorchOps)
