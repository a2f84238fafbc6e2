"""Quantised weights on the GPU: kept in their stored format, and multiplied without a
dequantised copy.

A weight in FP8 by row has a scale for each output; one by group has a scale for each output and
128 inputs. Their products quantise the input rows in the same way, and use the FP8 tensor cores; a
single row is not quantised. 4-bit weights are converted inside the product.

Rows of gate and up are interleaved in one weight, because our kernels gate their results. FP8
weights by group have all rows of gate, then all of up: their blocks stay whole, as torch's
products need them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headwater.device.gpu import fp8_blocks
from headwater.device.kernels import fp8_gemm as fp8
from headwater.device.kernels import int4_gemm as int4
from headwater.device.kernels import quantized as kernels
from headwater.device.kernels import rows
from headwater.device.kernels.activation import GateActivation
from headwater.device.kernels.gemv import gemv
from headwater.device.kernels.quantized import Code
from headwater.device.kernels.quantized_gemv import gemv as quantized_gemv
from headwater.device.quantization.matrices import Fp8Matrix, Int4Matrix, QuantizedMatrix

Norm = tuple[Tensor, float]

_FP8_CHUNK = 256
"""Inputs that `gemv` handles together if a row has one scale; sizes are multiples of it."""

_MAX_CHUNK = 128
"""Maximum number of inputs of a chunk of 4-bit codes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight `[outputs, inputs]` with fewer bits."""

    codes: Tensor
    """`[outputs, inputs]` of e4m3, or `[outputs, inputs / 2]` of bytes."""

    scales: Tensor
    """`[outputs]`, or `[outputs, groups]`, which are stored transposed."""

    zeros: Tensor | None = None
    """Like the scales, and of their type; None means 8 everywhere."""

    code: Code
    group: int
    """Inputs that share a scale, or the chunk size if a row has one scale."""

    arrived: Tensor
    """Counters of products with split inputs; those of one weight run one after another."""

    blocks: Tensor | None = None
    """`[outputs / 128, inputs / 128]`: scales of whole blocks, for torch's products."""

    library_types: tuple[torch.dtype, ...] = ()
    """Types of rows for which torch has products in FP8 with this weight by group."""

    in_halves: bool = False
    """Whether a weight of gate and up has all rows of gate first; otherwise they are
    interleaved."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, width = self.codes.shape
        return outputs, width * (2 if self.code >= Code.INT4 else 1)

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, chosen: slice) -> "QuantizedWeight":
        """Some of the outputs, in the same memory."""
        return replace(
            self,
            codes=self.codes[chosen],
            scales=self.scales[chosen],
            zeros=None if self.zeros is None else self.zeros[chosen],
            blocks=None,
            library_types=(),
        )

    def one_row(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        factor: float = 1.0,
        activation: GateActivation = GateActivation.SILU,
    ) -> Tensor:
        """See `gemv`."""
        if self.code is Code.FP8_ROW and not gated:
            return gemv(
                x, self.codes, scales=self.scales, norm=norm, residual=residual, factor=factor
            )
        return quantized_gemv(
            x, self.codes, self.scales, self.zeros, code=self.code, group=self.group,
            norm=norm, gated=gated, in_halves=self.in_halves, residual=residual, factor=factor,
            activation=activation,
        )  # fmt: skip

    def gated(self, x: Tensor, norm: Norm | None, activation: GateActivation) -> Tensor | None:
        """`activation(gate) * up`, from one weight of gate and up; None if the product with
        `plain` is faster, whose rows are interleaved in this case."""
        if len(x) == 1:
            return self.one_row(x, norm=norm, gated=True, activation=activation)
        result = self._fused(x, norm, is_gated=True, activation=activation)
        if result is None and (self.in_halves or self.is_multiplied(len(x))):
            return rows.gate(self.product(x, norm), activation, in_halves=self.in_halves)
        return result

    def add_to(self, hidden: Tensor, x: Tensor, factor: float) -> None:
        """Multiply `x @ weight.T` by `factor` and add it to `hidden` in place."""
        if len(x) == 1:
            self.one_row(x, residual=hidden, factor=factor)
        elif self._fused(x, residual=hidden, factor=factor) is None:
            hidden.add_(self.product(x), alpha=factor)

    def product(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """`norm(x) @ weight.T`."""
        if len(x) == 1:
            return self.one_row(x, norm=norm)
        result = self._fused(x, norm)
        if result is not None:
            return result
        if self.takes_codes(x):
            return self.of_codes(*self._quantized(x, norm), x)
        normed = x if norm is None else rows.norm(x, *norm)
        if self.code is Code.FP8_GROUP and len(x) <= kernels.MAX_SMALL_ROWS:
            return kernels.small_gemm(normed, self.codes, self.scales, group=self.group)
        return torch.mm(normed, self.plain(x.dtype).T)

    def takes_codes(self, x: Tensor) -> bool:
        """Whether these rows are quantised, and torch multiplies them."""
        if self.code is Code.FP8_ROW:
            return len(x) > 1 and not fp8.fits(self.codes, len(x))
        return len(x) > 1 and x.dtype in self.library_types

    def of_codes(self, codes: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        """`x @ weight.T`, by torch; `codes` and `scales` are `x`, quantised."""
        if self.code is Code.FP8_GROUP:
            return fp8_blocks.product(
                codes, scales, self.codes, self.scales, self.blocks, x.dtype
            )[: len(x)]
        return torch._scaled_mm(
            codes,
            self.codes.T,
            scale_a=scales,
            scale_b=self.scales[None],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )

    def _quantized(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        if self.code is Code.FP8_ROW:
            return kernels.quantize_rows(x, norm)
        return kernels.quantize_groups(x, norm, fp8_blocks.padded(len(x)))

    def is_multiplied(self, num_rows: int) -> bool:
        """Whether products of this many rows use no dequantised copy of the weight."""
        return (
            self.code is Code.FP8_ROW
            or (self.code is Code.FP8_GROUP and num_rows <= kernels.MAX_SMALL_ROWS)
            or bool(self.library_types)
            or self._fits_int4(num_rows)
        )

    def _fused(
        self,
        x: Tensor,
        norm: Norm | None = None,
        *,
        is_gated: bool = False,
        residual: Tensor | None = None,
        factor: float = 1.0,
        activation: GateActivation = GateActivation.SILU,
    ) -> Tensor | None:
        """The product with several rows. It is gated if `is_gated`, and multiplied by `factor`
        and added to `residual` if that is given. None if our kernels do not support it or are
        slower."""
        if self.code is Code.FP8_ROW and fp8.fits(self.codes, len(x)):
            codes, scales = kernels.quantize_rows(x, norm)
            return fp8.fp8_gemm(
                codes, scales, self.codes, self.scales, self.arrived, dtype=x.dtype,
                is_gated=is_gated, residual=residual, factor=factor, activation=activation,
            )  # fmt: skip
        if self._fits_int4(len(x)):
            normed = x if norm is None else rows.norm(x, *norm)
            return int4.int4_gemm(
                normed, self.codes, self.scales, self.zeros, self.arrived, is_gated=is_gated,
                residual=residual, factor=factor, activation=activation,
            )  # fmt: skip
        return None

    def _fits_int4(self, num_rows: int) -> bool:
        return self.code is Code.INT4 and int4.fits(
            self.codes, self.scales, self.zeros, num_rows
        )

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weight, in new memory."""
        if self.code is Code.FP8_ROW:
            return (self.codes.float() * self.scales[:, None]).to(dtype)
        # Gate and up may be views of one weight with interleaved rows.
        return kernels.dequantize(
            self.codes.contiguous(),
            self.scales.contiguous(),
            None if self.zeros is None else self.zeros.contiguous(),
            code=self.code,
            group=self.group,
            size=self.shape[1],
            dtype=dtype,
        )


Weight = Tensor | QuantizedWeight


def rows_from(weight: Weight, start: int) -> Weight:
    """A weight without its first outputs."""
    if isinstance(weight, QuantizedWeight):
        return weight.rows(slice(start, None))
    return weight[start:]


class QuantizedLinear(nn.Module):
    """Replaces a linear layer in transformers' own code."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.quantized = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed_bytes(self) -> int:
        """Memory of the weight, which is not a parameter."""
        weight = self.quantized
        zeros = 0 if weight.zeros is None else weight.zeros.nbytes
        return weight.codes.nbytes + weight.scales.nbytes + zeros

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.quantized.plain(x.dtype), self.bias)


def linear_weight(layer: nn.Module) -> Weight:
    """The weight of a linear layer, quantised or not."""
    if isinstance(layer, QuantizedLinear):
        return layer.quantized
    weight = layer.weight
    assert isinstance(weight, Tensor), "not a linear layer"
    return weight.data


def can_stay(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels support a matrix in its stored format."""
    outputs, inputs = matrix.shape
    if isinstance(matrix, Fp8Matrix):
        by_row = matrix.block[1] >= inputs
        return (
            outputs % 16 == 0
            and inputs % _FP8_CHUNK == 0
            and (by_row or matrix.block[1] == 128)
        )
    size = matrix.group_size
    return matrix.groups is None and size % 32 == 0 and inputs % min(size, _MAX_CHUNK) == 0


def quantized_weight(matrix: QuantizedMatrix, dtype: torch.dtype) -> QuantizedWeight:
    """The kernels' form of a matrix for which `can_stay` is true."""
    if isinstance(matrix, Int4Matrix):
        return _int4_weight(matrix, dtype)
    outputs, inputs = matrix.shape
    scales = matrix.scales.repeat_interleave(matrix.block[0], 0)[:outputs].contiguous()
    if matrix.block[1] >= inputs:
        scales, code, group = scales[:, 0], Code.FP8_ROW, _FP8_CHUNK
    else:
        scales, code, group = _groups_first(scales), Code.FP8_GROUP, matrix.block[1]
    return _with_library(
        QuantizedWeight(
            codes=matrix.codes,
            scales=scales,
            code=code,
            group=group,
            arrived=_counters(matrix.codes),
        )
    )


def _with_library(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight, prepared for torch's products if it is in FP8 by group."""
    if weight.code is not Code.FP8_GROUP:
        return weight
    return replace(
        weight,
        blocks=fp8_blocks.block_scales(weight.scales),
        library_types=fp8_blocks.offered_types(weight.codes.device, *weight.shape),
    )


def _counters(codes: Tensor) -> Tensor:
    return torch.zeros(fp8.num_counters(len(codes)), dtype=torch.int32, device=codes.device)


def _int4_weight(matrix: Int4Matrix, dtype: torch.dtype) -> QuantizedWeight:
    inputs = matrix.shape[1]
    chunk = min(matrix.group_size, _MAX_CHUNK)
    while inputs % chunk or matrix.group_size % chunk:
        chunk //= 2
    repeat = matrix.group_size // chunk
    # Of the scales' type: the copy engine cannot write a narrow tile of bytes.
    zeros = None if matrix.zeros is None else matrix.zeros.to(dtype)
    scales = matrix.scales.to(dtype).repeat_interleave(repeat, 1)
    return QuantizedWeight(
        arrived=_counters(matrix.codes),
        codes=packed_quarters(matrix.codes, chunk),
        scales=_groups_first(scales),
        zeros=None if zeros is None else _groups_first(zeros.repeat_interleave(repeat, 1)),
        code=Code.INT4,
        group=chunk,
    )


def _groups_first(values: Tensor) -> Tensor:
    """The same `[outputs, groups]`, with the values of a group next to each other in memory."""
    return values.T.contiguous().T


def packed_quarters(codes: Tensor, chunk: int) -> Tensor:
    """4-bit codes `[…, inputs]` as bytes, in the order that `unpack` describes."""
    parts = codes.view(*codes.shape[:-1], -1, 4, chunk // 4).unbind(-2)
    pairs = (parts[0] | (parts[1] << 4), parts[2] | (parts[3] << 4))
    return torch.stack(pairs, dim=-1).flatten(-3)


def joined(layers: Sequence[QuantizedLinear]) -> QuantizedWeight | None:
    """One weight with the outputs of all parts, one after another; the parts become views of
    it. None if they are quantised differently."""
    if not _are_alike(layers):
        return None
    whole = _combined([layer.quantized for layer in layers], torch.cat)
    start = 0
    for layer in layers:
        end = start + len(layer.quantized)
        layer.quantized = whole.rows(slice(start, end))
        start = end
    return whole


def interleaved(gate: QuantizedLinear, up: QuantizedLinear) -> QuantizedWeight | None:
    """One weight with the outputs of both layers, interleaved or `in_halves`; the layers become
    views of it. None if they are quantised differently."""
    if not _are_alike((gate, up)):
        return None
    if gate.quantized.code is Code.FP8_GROUP:
        whole = joined((gate, up))
        return whole and replace(whole, in_halves=True)
    whole = _combined(
        (gate.quantized, up.quantized),
        lambda parts: torch.stack(parts, dim=1).flatten(0, 1),
    )
    gate.quantized, up.quantized = whole.rows(slice(0, None, 2)), whole.rows(slice(1, None, 2))
    return whole


def _are_alike(layers: Sequence[QuantizedLinear]) -> bool:
    weights = [layer.quantized for layer in layers]
    return len({(w.code, w.group, w.zeros is None, w.scales.dtype) for w in weights}) == 1


def _combined(
    weights: Sequence[QuantizedWeight], combine: Callable[[list[Tensor]], Tensor]
) -> QuantizedWeight:
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    scales = combine([weight.scales for weight in weights])
    # torch cannot stack e4m3, so its bytes are stacked.
    codes = combine([weight.codes.view(torch.uint8) for weight in weights])
    whole = replace(
        weights[0],
        codes=codes.view(weights[0].codes.dtype),
        arrived=_counters(codes),
        scales=scales if scales.dim() == 1 else _groups_first(scales),
        zeros=_groups_first(combine(zeros)) if zeros else None,
    )
    return _with_library(whole)
