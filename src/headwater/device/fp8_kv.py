"""KV in 8 bits: e4m3 elements, with a scale for each token and head inside the block.

A scale depends only on its own token and head. So a token is stored once and never rewritten,
and the step or chunk in which it was computed makes no difference. The scale is a power of two,
stored as its exponent in one byte. Scaling is then exact: values that are read back are exact
in bfloat16 and float32, and storing them again gives the same bytes.

    exponent byte b    scale 2 ** (b - 127); the largest number of the head is above 224 and at
                       most 448 times the scale
"""

import torch
from torch import Tensor

from headwater.device.kv import KVPool
from headwater.device.model import LoadedModel

FP8 = torch.float8_e4m3fn

_TOP_FRACTION = 0x600000
"""Fraction bits of 448, the largest e4m3 value, as a float32: it is 1.75 * 2 ** 8."""

_MIN_FLOAT16_BYTE = 112
"""Smaller scales would give values that float16 cannot represent exactly."""


def open_pool(
    model: LoadedModel, num_blocks: int, block_tokens: int, *, shared: bool = False
) -> KVPool:
    """The pool of a model, in the format of its layout."""
    kind = Fp8KVPool if model.has_fp8_kv else KVPool
    return kind(model, num_blocks=num_blocks, block_tokens=block_tokens, shared=shared)


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 elements and exponent bytes `[…]` of heads `[…, head_dim]`."""
    exact = heads.float()
    bits = exact.abs().amax(dim=-1).view(torch.int32)
    above = (bits & 0x7FFFFF) > _TOP_FRACTION
    least = _MIN_FLOAT16_BYTE if heads.dtype == torch.float16 else 1
    exponents = ((bits >> 23) - 8 + above.int()).clamp_(min=least)
    inverse = ((254 - exponents) << 23).view(torch.float32)
    return (exact * inverse[..., None]).to(FP8), exponents.to(torch.uint8)


def dequantize(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The heads, from elements `[…, head_dim]` and exponents `[…]`."""
    scales = (exponents.int() << 23).view(torch.float32)
    return (numbers.float() * scales[..., None]).to(dtype)


class Fp8KVPool(KVPool):
    """A pool whose blocks are e4m3 elements and their scales.

    `data` is a view of the elements. It is not contiguous, because scales follow the elements
    of each layer.
    """

    def _numbers(self) -> Tensor:
        """Views for kernels and for writes by row; row r is `r % lines` of layer `r // lines`."""
        layout, heads = self.layout, self.kv_heads
        self._lines = self.planes * self.block_tokens
        layers = self.blocks.view(-1, layout.layer_bytes)
        numbers, scales = layers.tensor_split((layout.numbers_bytes,), dim=1)
        self._codes = numbers.view(len(layers), self._lines, heads * self.head_dim)
        self._exponents = scales.view(len(layers), self._lines, heads)
        shape = (
            *(self.num_blocks, self.num_layers, self.planes),
            *(self.block_tokens, heads, self.head_dim),
        )
        row = heads * self.head_dim
        strides = (layout.block_bytes, layout.layer_bytes, self.block_tokens * row, row)
        return self.blocks.view(FP8).as_strided(shape, (*strides, self.head_dim, 1))

    def rounded(self, heads: Tensor) -> Tensor:
        """K or V as they are read back from the pool."""
        return dequantize(*quantize(heads), heads.dtype)

    def write(self, rows: Tensor, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVPool.write`."""
        for plane, source in zip(rows, (keys, values), strict=False):
            self._put(plane, source.index_select(0, tokens))

    def write_heads(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `KVPool.write_heads`."""
        shape = (-1, self.kv_heads, self.head_dim)
        for plane, source in zip(rows.unbind(1), (keys, values), strict=False):
            self._put(plane.flatten(), source.view(shape))

    def read(self, slots: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Like `KVPool.read`, but the result is in new memory."""
        planes = self._get(slots * self.num_layers + layer).unbind(1)
        return planes[0].flatten(0, 1), planes[-1].flatten(0, 1)

    def read_whole(self, slots: Tensor) -> Tensor:
        """Like `KVPool.read_whole`, but the result is in new memory."""
        layers = torch.arange(self.num_layers, device=slots.device)
        wanted = (slots[:, None] * self.num_layers + layers).flatten()
        whole = self._get(wanted)
        return whole.view(len(slots), self.num_layers, *whole.shape[1:])

    def _put(self, rows: Tensor, heads: Tensor) -> None:
        numbers, exponents = quantize(heads)
        at = rows // self._lines, rows % self._lines
        self._codes[at] = numbers.view(torch.uint8).flatten(1)
        self._exponents[at] = exponents

    def _get(self, layers: Tensor) -> Tensor:
        """The KV of these rows, each one layer of one block: `[rows, planes, block_tokens,
        kv_heads, head_dim]`."""
        codes = self._codes.index_select(0, layers).view(FP8)
        shape = (-1, self.planes, self.block_tokens, self.kv_heads)
        exponents = self._exponents.index_select(0, layers).view(shape)
        return dequantize(codes.view(*shape, self.head_dim), exponents, self.dtype)
