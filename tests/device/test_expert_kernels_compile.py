"""Kernels of experts compile for Hopper, for each type of rows. This needs Triton, and no GPU."""

import os
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from headwater.device.kernels import expert_choice, expert_groups, mx_experts, mx_prompts  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
HALVES = ["bf16", "fp16"]
SIZES = {"SIZE": 160, "OUTPUTS": 96, "TOP": 2}
ACTIVATED = {"alpha": "fp32", "limit": "fp32", "ACTIVATION": 2}
LISTED = {"shares": "*fp32", "lists": "*i32", "counts": "*i32", "capacity": "i32"}


def compiled(kernel: Any, *, num_warps: Any = 4, **given: Any) -> Any:
    """The kernel for arguments of these types and these constants, compiled to a binary."""
    types = {
        name: given[name] if isinstance(given[name], str) else "constexpr"
        for name in kernel.arg_names
    }
    constants = {name: value for name, value in given.items() if types.get(name) == "constexpr"}
    aligned: Any = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER, options={"num_warps": num_warps})


@pytest.mark.parametrize("rows", HALVES)
def test_pairs(rows: str) -> None:
    x = f"*{rows}"
    packed = {"weight": "*i64", "scales": "*u8", "bias": x, "ids": "*i32"}
    up = compiled(
        mx_experts._pair_gate_up, **packed, **SIZES, **ACTIVATED, x=x, norm_weight=x, out=x,
        epsilon="fp32", EACH=8, N=8, WIDTH=16, NORMED=True, BIASED=True, STAGES=3, EARLY=True,
        num_warps=8,
    )  # fmt: skip
    down = compiled(
        mx_experts._pair_down, **packed, **SIZES, x=x, shares="*fp32", hidden=x, N=8, WIDTH=16,
        BIASED=True, EARLY=True,
    )  # fmt: skip

    assert up.asm["cubin"]
    assert down.asm["cubin"]


@pytest.mark.parametrize("rows", HALVES)
@pytest.mark.parametrize("tile", sorted(mx_experts._SHAPES))
def test_groups(rows: str, tile: int) -> None:
    lines, stages, warps = mx_experts._SHAPES[tile]
    x = f"*{rows}"
    kernel = compiled(
        mx_experts._grouped, **SIZES, **ACTIVATED, **LISTED, x=x, weight="*i16", scales="*u8",
        bias=x, out=x, M=tile, N=lines, G=mx_experts._GROUPS, GATED=True, BIASED=True,
        STAGES=stages, EARLY=True, num_warps=warps,
    )  # fmt: skip

    assert kernel.asm["cubin"]


@pytest.mark.parametrize("rows", [*HALVES, "fp32"])
def test_prompts(rows: str) -> None:
    """For prompts, weights are converted first and then multiplied. Rows of float32 are always
    computed in this way."""
    x = f"*{rows}"
    unpacked = compiled(
        mx_prompts._unpack, weight="*i16", scales="*u8", out=x, first="i32", last="i32",
        GROUPS=mx_prompts._GROUPS,
    )  # fmt: skip
    is_exact = rows == "fp32"
    n, k, stages, warps = expert_groups._EXACT_SHAPE if is_exact else expert_groups._SHAPES[128]
    product = compiled(
        expert_groups._grouped, **SIZES, **ACTIVATED, **LISTED, x=x, weight=x, bias=x,
        x_scales=x, scales=x, out=x, M=16 if is_exact else 128, N=n, K=k, FEW=is_exact,
        GATED=True, INTERLEAVED=True, BIASED=True, SCALING=0, QUANTIZED=False, EXACT=is_exact,
        STAGES=stages, num_warps=warps,
    )  # fmt: skip

    assert unpacked.asm["cubin"]
    assert product.asm["cubin"]


@pytest.mark.parametrize("rows", [*HALVES, "fp32"])
def test_router(rows: str) -> None:
    x = f"*{rows}"
    kernel = compiled(
        expert_choice._normalise_and_choose, hidden=x, added=x, norm_weight=x, router=x,
        router_bias=x, correction="*fp32", normed=x, ids="*i32", weights="*fp32",
        epsilon="fp32", scale="fp32", SIZE=160, K=256, BLOCK=256, ADDED=True, BIASED=True,
        EXPERTS=5, WIDTH=8, TOP=2, TOP_WIDTH=2, SCORE=2, CORRECTED=False, RENORMALISED=False,
        GROUPS=1, GROUPS_WIDTH=1, TOP_GROUPS=1, BY_BEST=False, EARLY=True, num_warps=8,
    )  # fmt: skip

    assert kernel.asm["cubin"]
