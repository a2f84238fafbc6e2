"""Kernels of quantised weights and 8-bit KV, against float64 over the stored values."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.fp8_kv import Fp8KVPool
from headwater.device.model import LoadedModel, load
from tests.device.driver import Driver
from tests.device.families import prompt, quantize_experts, save_family
from tests.device.gpu import pytestmark, require_gpu
from tests.device.pool_shape import PoolShape

require_gpu()

from headwater.bench._gpu_quant import quantized_matrix  # noqa: E402 - Triton below
from headwater.device.gpu.fp8_blocks import padded, product  # noqa: E402
from headwater.device.gpu.mlp import DenseMLP, RmsNorm, activated, add_dense  # noqa: E402
from headwater.device.gpu.packed_experts import PackedExperts  # noqa: E402
from headwater.device.gpu.quantized import (  # noqa: E402
    QuantizedLinear,
    QuantizedWeight,
    interleaved,
    quantized_weight,
)
from headwater.device.gpu.runner import CudaRunner  # noqa: E402
from headwater.device.gpu.work import num_entries, split_contexts, tiles  # noqa: E402
from headwater.device.kernels.activation import GateActivation  # noqa: E402
from headwater.device.kernels.decode import attend_decodes  # noqa: E402
from headwater.device.kernels.pieces import DecodeWork  # noqa: E402
from headwater.device.kernels.prefill import attend_chunks, has_hopper_kernel  # noqa: E402
from headwater.device.kernels.quantized import quantize_groups  # noqa: E402
from headwater.device.kernels.rotary import rotate  # noqa: E402
from headwater.device.kernels.tiles import ChunkWork  # noqa: E402
from headwater.device.quantization.matrices import Int4Matrix  # noqa: E402
from tests.device.test_gpu_kernels import VARIANTS, attended, error, gated, ints  # noqa: E402

__all__ = ["pytestmark"]

DEVICE = torch.device("cuda")
NAN = float("nan")
LAYER = 1
SHAPES = [(32, 8, 128, 64), (8, 4, 32, 16), (64, 4, 64, 64)]
"""Heads, KV heads, head size, block tokens."""


def filled_pool(kv_heads: int, dim: int, block_tokens: int) -> Fp8KVPool:
    """Random KV whose heads differ in size, some of them zero, stored by the rotary kernel."""
    model: Any = PoolShape(
        2, kv_heads, dim, dtype=torch.bfloat16, device=DEVICE, has_fp8_kv=True
    )
    pool = Fp8KVPool(model, num_blocks=2600 // block_tokens + 2, block_tokens=block_tokens)
    count = 2600
    packed = torch.randn(count, 3 * kv_heads, dim, device=DEVICE)
    packed *= torch.exp(2 * torch.randn(count, 3 * kv_heads, 1, device=DEVICE))
    packed[::50] = 0.0
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE)
    table = (
        torch.ones(count, dim // 2, device=DEVICE),
        torch.zeros(count, dim // 2, device=DEVICE),
    )
    flat = packed.bfloat16().view(count, -1)
    kept = flat.clone().view(count, 3, kv_heads, dim)
    slots = positions // block_tokens
    rotate(flat, positions, slots.int(), table, pool.data, LAYER, None)
    keys, values = pool.read(torch.arange(count // block_tokens, device=DEVICE), LAYER)
    whole = len(keys)
    assert torch.equal(keys, pool.rounded(kept[:whole, 1])), "stored as the CPU would"
    assert torch.equal(values, pool.rounded(kept[:whole, 2]))
    return pool


@pytest.mark.parametrize("variant_name", list(VARIANTS))
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_over_8_bit_kv(shape: tuple[int, int, int, int], variant_name: str) -> None:
    """Attention of rows of all lengths, including unused ones, is right, whole and in
    pieces."""
    heads, kv_heads, dim, block_tokens = shape
    pool = filled_pool(kv_heads, dim, block_tokens)
    variant = VARIANTS[variant_name](heads, dim**-0.5)
    contexts = [1, block_tokens, block_tokens + 1, 700, 2049, 5]
    tables = [
        np.random.default_rng(c).permutation(2600 // block_tokens)[: -(-c // block_tokens)]
        for c in contexts
    ]
    widths = [len(table) for table in tables]
    size = len(contexts) + 2
    pieces = split_contexts(np.array(contexts), size, kv_heads)
    entries = num_entries(size, kv_heads)
    work = DecodeWork(
        contexts=ints([*contexts, 0, 0]),
        tables=ints(np.concatenate(tables)),
        table_start=ints(np.append(np.cumsum(widths) - widths, [0, 0])),
        piece=ints([pieces.piece]),
        work_row=ints(pieces.work_row),
        work_start=ints(pieces.work_start),
        row_work=ints(pieces.row_work),
        arrived=torch.zeros((size, kv_heads), dtype=torch.int32, device=DEVICE),
        partial=torch.full((entries, heads, dim), NAN, device=DEVICE),
        partial_lse=torch.full((entries, heads), NAN, device=DEVICE),
    )
    query = torch.randn(size, (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    out = torch.full((size, heads, dim), NAN, device=DEVICE, dtype=torch.bfloat16)

    attend_decodes(query, pool.data, LAYER, work, variant, out)

    for row, context in enumerate(contexts):
        keys, values = pool.read(torch.from_numpy(tables[row]).to(DEVICE), LAYER)
        own = query[row : row + 1, : heads * dim].view(1, heads, dim)
        exact = attended(own, keys[:context], values[:context], context - 1, variant)
        assert error(out[row : row + 1], exact) < 1e-2, f"row {row}"


@pytest.mark.parametrize("variant_name", list(VARIANTS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("use_hopper", [False, True])
def test_chunks_over_8_bit_kv(
    shape: tuple[int, int, int, int], variant_name: str, use_hopper: bool
) -> None:
    """Chunks after prefixes are right, read directly or converted for the Hopper kernel."""
    heads, kv_heads, dim, block_tokens = shape
    pool = filled_pool(kv_heads, dim, block_tokens)
    if use_hopper and not has_hopper_kernel(pool.data, torch.bfloat16):
        pytest.skip("this shape is not one of the kernel for Hopper")
    variant = VARIANTS[variant_name](heads, dim**-0.5)
    counts, contexts = [1, 40, 130, 300], [30, 40, 700, 1300]
    tables = [
        np.random.default_rng(c).permutation(2600 // block_tokens)[: -(-c // block_tokens)]
        for c in contexts
    ]
    widths, starts = [len(table) for table in tables], np.concatenate(([0], np.cumsum(counts)))
    shared = tiles(
        np.array(counts), np.array(contexts), first_row=0, tile=128, heads=heads,
        has_hopper_kernel=False,
    )  # fmt: skip
    parts = 1 if use_hopper else shared.num_parts
    rows = len(shared.row) * parts * 128
    work = ChunkWork(
        contexts=ints(contexts),
        query_start=ints(starts),
        tables=ints(np.concatenate(([0, 0], *tables))),
        table_start=ints(np.cumsum(widths) - widths + 2),
        tile=128,
        tile_row=ints(shared.row),
        tile_start=ints(shared.start),
        longest_context=max(contexts),
        use_hopper=use_hopper,
        num_parts=parts,
        part_keys=ints(shared.part_keys),
        partial=torch.full((rows, heads, dim), NAN, device=DEVICE),
        partial_lse=torch.full((rows, heads), NAN, device=DEVICE),
        first_entry=2,
        end_entry=2 + sum(widths),
    )
    query = torch.randn(sum(counts), (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    out = torch.full((sum(counts), heads, dim), NAN, device=DEVICE, dtype=torch.bfloat16)

    attend_chunks(query, pool.data, LAYER, work, variant, out)

    for row, context in enumerate(contexts):
        keys, values = pool.read(torch.from_numpy(tables[row]).to(DEVICE), LAYER)
        mine = slice(starts[row], starts[row + 1])
        own = query[mine, : heads * dim].view(-1, heads, dim)
        first = context - counts[row]
        exact = attended(own, keys[:context], values[:context], first, variant)
        assert error(out[mine], exact) < 1e-2, f"row {row}"


def make_weight(method: str, outputs: int = 1024, inputs: int = 2048) -> QuantizedWeight:
    weight = torch.randn(outputs, inputs, device=DEVICE).bfloat16()
    return quantized_weight(quantized_matrix(weight, method), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64, 100, 128, 300])
@pytest.mark.parametrize("method", ["fp8_channel", "fp8_block", "int4"])
def test_products_of_quantised_weights(method: str, rows: int) -> None:
    """Plain, gated and added products of every number of rows are right. FP8 rounds its inputs,
    except for a single row."""
    weight = make_weight(method)
    plain = weight.plain(torch.float32).double()
    x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
    hidden = torch.randn(rows, 1024, device=DEVICE).bfloat16()
    before = hidden.double()
    allowed = 4e-2 if method != "int4" and rows > 1 else 5e-3
    exact = x.double() @ plain.T

    assert error(weight.product(x), exact) < allowed
    weight.add_to(hidden, x, 0.5)
    assert error(hidden, before + 0.5 * exact) < allowed
    both = weight.gated(x, None, GateActivation.SILU)
    if both is not None:
        assert error(both, gated(exact)) < 2 * allowed


@pytest.mark.parametrize("rows", [1, 2, 33, 128, 300])
@pytest.mark.parametrize("method", ["fp8_channel", "fp8_block", "int4"])
def test_gate_and_up_as_one_weight(method: str, rows: int) -> None:
    """The gated product of two layers is right, with a norm inside, and the layers keep their
    weights. Its rows are interleaved, except for scales of blocks."""
    parts = [make_weight(method) for _ in range(2)]
    plain = [part.plain(torch.float32) for part in parts]
    gate, up = (QuantizedLinear(part, None) for part in parts)
    norm = RmsNorm(torch.rand(2048, device=DEVICE).bfloat16(), 1e-5)
    x = torch.randn(rows, 2048, device=DEVICE).bfloat16()

    both = interleaved(gate, up)

    assert both is not None
    assert both.in_halves == (method == "fp8_block")
    for part, before in zip((gate, up), plain, strict=True):
        assert torch.equal(part.quantized.plain(torch.float32), before)
    mlp = DenseMLP(up=both, down=parts[0], activation=GateActivation.SILU)
    normed = torch.rms_norm(x.double(), [2048], norm.weight.double(), norm.epsilon)
    first, second = (normed @ part.double().T for part in plain)
    allowed = 8e-2 if method != "int4" and rows > 1 else 1e-2
    ours = activated(mlp, x, norm, is_eager=True)
    assert error(ours, torch.nn.functional.silu(first) * second) < allowed


@pytest.mark.parametrize("rows", [1, 2, 33, 128, 129, 300])
@pytest.mark.parametrize("method", ["fp8_channel", "fp8_block", "int4"])
def test_a_whole_mlp(method: str, rows: int) -> None:
    """Norm, gated product and the product after it, which is added, are right; the rows between
    both products are rounded at most once more."""
    gate, up = (QuantizedLinear(make_weight(method), None) for _ in range(2))
    down = make_weight(method, 2048, 1024)
    first, second, third = (
        part.plain(torch.float32).double() for part in (gate.quantized, up.quantized, down)
    )
    both = interleaved(gate, up)
    assert both is not None
    mlp = DenseMLP(up=both, down=down, activation=GateActivation.SILU)
    norm = RmsNorm(torch.rand(2048, device=DEVICE).bfloat16(), 1e-5)
    hidden = torch.randn(rows, 2048, device=DEVICE).bfloat16()
    normed = torch.rms_norm(hidden.double(), [2048], norm.weight.double(), norm.epsilon)
    narrow = torch.nn.functional.silu(normed @ first.T) * (normed @ second.T)
    exact = narrow @ third.T

    scale = 0.5 / float(exact.std())  # so that the sum does not hide the product
    expected = hidden.double() + scale * exact
    add_dense(mlp, hidden, norm=norm, output_norm=None, scale=scale, is_eager=True)

    assert error(hidden, expected) < (4e-2 if method != "int4" and rows > 1 else 1e-2)


@pytest.mark.parametrize("rows", [2, 3, 5, 64, 65, 130, 600])
@pytest.mark.parametrize("outputs", [1024, 12288])
def test_fp8_in_blocks_on_the_tensor_cores(outputs: int, rows: int) -> None:
    """torch's products are used on a Hopper GPU, with both forms of scales, and are those of the
    rounded rows; a replayed graph gives the same."""
    weight = make_weight("fp8_block", outputs)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs have no products with scales of blocks")
    assert torch.bfloat16 in weight.library_types
    assert weight.blocks is not None
    x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
    codes, scales = quantize_groups(x, None, padded(rows))
    values = codes.double() * scales.T.double().repeat_interleave(128, 1)
    exact = values[:rows] @ weight.plain(torch.float32).double().T
    results = {
        "used": weight.product(x),
        "outputs": product(codes, scales, weight.codes, weight.scales, None, x.dtype)[:rows],
    }
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results["graph"] = weight.product(x)
    graph.replay()

    for name, result in results.items():
        assert error(result, exact) < 5e-3, name


def test_fp8_in_blocks_without_the_library() -> None:
    """Where torch has no such products, weights are dequantised, and rows are not rounded."""
    weight = replace(make_weight("fp8_block"), library_types=())
    plain = weight.plain(torch.float32).double()

    for rows in (2, 32, 33, 300):
        x = torch.randn(rows, 2048, device=DEVICE).bfloat16()
        assert error(weight.product(x), x.double() @ plain.T) < 5e-3, f"{rows} rows"


@pytest.mark.parametrize("rows", [1, 8, 20, 128])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_products_of_4_bit_weights(
    has_zeros: bool, group: int, kind: torch.dtype, rows: int
) -> None:
    """Products are right for every group size, with zero points and without, and in both 16-bit
    types."""
    codes = torch.randint(0, 16, (512, 1024), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(512, 1024 // group, device=DEVICE).to(kind).float()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=DEVICE)
    matrix = Int4Matrix(codes=codes, scales=scales, zeros=zeros if has_zeros else None)
    weight = quantized_weight(matrix, kind)
    x = torch.randn(rows, 1024, device=DEVICE).to(kind)
    exact = x.double() @ matrix.dequantize(torch.float32).double().T

    assert error(weight.product(x), exact) < 5e-3
    assert error(weight.plain(kind), matrix.dequantize(torch.float32).double()) < 5e-3


def test_a_weight_that_cannot_be_copied_in_tiles_is_multiplied_otherwise() -> None:
    """A weight at an address that the copy engine does not accept gives the same product."""
    weight = make_weight("int4")
    room = torch.empty(weight.codes.numel() + 8, dtype=torch.uint8, device=DEVICE)
    moved = replace(weight, codes=room[8:].view(weight.codes.shape).copy_(weight.codes))
    x = torch.randn(20, 2048, device=DEVICE).bfloat16()
    assert not moved.is_multiplied(len(x))

    assert error(moved.product(x), weight.product(x).double()) < 1e-2


def greedy(model: LoadedModel, sizes: tuple[int, ...], runner: Any = None) -> list[int]:
    """Tokens of a prompt that is computed in pieces of these sizes."""
    driver = Driver(model, block_tokens=64, num_blocks=16, runner_class=runner)
    sequence = driver.add(prompt(sum(sizes)))
    for size in sizes:
        driver.step((sequence, size))
    driver.finish(sequence, count=12)
    return sequence.output


def test_8_bit_kv_gives_the_same_tokens_in_chunks(family: Any) -> None:
    """A token has its own scale, so the chunk in which it was stored makes no difference."""
    model = replace(load(family("llama"), device="cuda"), has_fp8_kv=True)

    whole = greedy(model, (150,), CudaRunner)

    assert greedy(model, (64, 80, 6), CudaRunner) == whole


def test_packed_experts_give_the_tokens_of_dequantised_ones(tmp_path: Any) -> None:
    """GPT-OSS in MXFP4 is kept packed on a GPU and dequantised on a CPU."""
    quantize_experts(save_family("gpt_oss", tmp_path))
    model = load(tmp_path, device="cuda")

    assert any(isinstance(module, PackedExperts) for module in model.module.modules())
    assert greedy(model, (30,), CudaRunner) == greedy(load(tmp_path), (30,))


def test_a_row_of_a_packed_weight_is_exact(tmp_path: Any) -> None:
    """A single row is not quantised: FP8 weights are multiplied with it directly."""
    weight = make_weight("fp8_channel")
    x = torch.randn(1, 2048, device=DEVICE).bfloat16()
    norm: tuple[Tensor, float] = (torch.rand(2048, device=DEVICE).bfloat16(), 1e-5)
    normed = torch.rms_norm(x.double(), [2048], norm[0].double(), 1e-5)

    assert (
        error(weight.product(x, norm), normed @ weight.plain(torch.float32).double().T) < 5e-3
    )
