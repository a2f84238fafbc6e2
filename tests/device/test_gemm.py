"""The compiled matrix products give the results of torch, for any sizes."""

import subprocess

import pytest
import torch
import torch.nn.functional as F

from headwater.device.gemm import PLUS, SILU, STORE, TIMES, Gemm, load_gemm
from headwater.native import compiler

OPS = {
    STORE: lambda product, other: product,
    SILU: lambda product, other: F.silu(product),
    TIMES: lambda product, other: product * other,
    PLUS: lambda product, other: product + other,
}


@pytest.fixture(scope="module")
def gemm() -> Gemm:
    found = load_gemm()
    assert found is not None, "the tests need a C compiler"
    return found


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [1, 6, 8, 13, 200])
@pytest.mark.parametrize(("width", "depth"), [(1, 3), (96, 40), (33, 1025), (100, 2048)])
def test_products_agree(gemm: Gemm, op: int, rows: int, width: int, depth: int) -> None:
    """Compiled products equal those of torch for whole tiles and panels, parts of them, and
    weights deeper than one pass."""
    x, weight = made(1, rows, depth), made(width, depth, seed=1) * depth**-0.5
    bias, other = made(width, seed=2), made(1, rows, width, seed=3)
    packed = gemm.pack(weight)

    for given in (None, bias):
        ours = gemm.multiply(x, packed, given, width, op, other)

        expected = OPS[op](F.linear(x, weight, given), other)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_others(gemm: Gemm) -> None:
    """A row has the same bits alone and among others: batching cannot change a token."""
    x, packed = made(21, 1500), gemm.pack(made(70, 1500, seed=1))

    together = gemm.multiply(x, packed, None, 70)

    for row in range(21):
        assert torch.equal(gemm.multiply(x[row : row + 1], packed, None, 70)[0], together[row])


def test_silu_is_right_for_large_numbers(gemm: Gemm) -> None:
    """The exponential neither overflows nor loses digits, on both sides of zero."""
    x = torch.linspace(-200.0, 200.0, 4001)[:, None]

    ours = gemm.multiply(x, gemm.pack(torch.ones(1, 1)), None, 1, SILU)

    torch.testing.assert_close(ours, F.silu(x), rtol=1e-6, atol=1e-7)


def test_inputs_need_not_be_contiguous(gemm: Gemm) -> None:
    """Inputs may be a view of other rows, and a residual may have other strides."""
    x, weight, other = made(10, 40)[::2], made(24, 40, seed=1), made(24, 5, seed=2).T

    ours = gemm.multiply(x, gemm.pack(weight), None, 24, PLUS, other)

    torch.testing.assert_close(ours, F.linear(x, weight) + other, rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_result(gemm: Gemm) -> None:
    """Panels are divided among threads; each sum belongs to one of them."""
    x, packed = made(9, 64), gemm.pack(made(500, 64, seed=1))
    alone = gemm.multiply(x, packed, None, 500)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = gemm.multiply(x, packed, None, 500)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(alone, together)


def test_a_machine_without_a_compiler_uses_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The missing compiler is logged, and there are no compiled products."""

    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "cc")

    monkeypatch.setattr(compiler, "compile_library", fails)

    assert load_gemm.__wrapped__() is None
    assert "more slowly" in caplog.text
