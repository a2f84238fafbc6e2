"""Compiles `native.c` with the machine's C compiler, once, and calls it.

Without a compiler everything works, but more slowly: `load` logs it and returns None.
"""

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from headwater.device.spans import SpanLengths
from headwater.native.compiler import open_library

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = (
    *("-O3", "-march=native"),
    # Only what is needed to vectorise a sum: infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
_WIDEST = 256
"""Largest head size, for sums on the C stack."""

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NativeOps:
    """`HostOps` for float32 on a CPU, on the calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = _function(library, "rms_norm", _P, _P, _P, _I, _I, _F)
        self._rotate = _function(library, "rotate", _P, _P, _P, _I, _I, _I, _I)
        self._scatter = _function(library, "scatter", _P, _P, _P, _P, _I, _I, _I, _I)
        self._own_scores = _function(library, "own_scores", _P, _P, _P, _P, _I)
        self._join_softmax = _function(library, "join_softmax", _P, _P, _P, _I)
        self._causal_softmax = _function(library, "causal_softmax", _P, _I, _I, _I, _I)
        self._own_values = _function(library, "own_values", _P, _P, _P, _P, _I)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        width = x.shape[-1]
        rows = x.numel() // width
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, epsilon)
        return out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count, num_heads, dim = heads.shape
        if heads.stride()[1:] != (dim, 1):
            heads = heads.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        turns = cos.data_ptr(), sin.data_ptr()
        self._rotate(heads.data_ptr(), *turns, count, heads.stride(0), num_heads, dim)
        return heads

    def scatter(self, source: Tensor, tokens: Tensor, rows: Tensor, target: Tensor) -> None:
        width = target.shape[-1]
        pieces = source[0].numel() // width
        if not source[0].is_contiguous():
            source = source.contiguous()
        where = tokens.data_ptr(), rows.data_ptr(), target.data_ptr()
        self._scatter(source.data_ptr(), *where, len(tokens), source.stride(0), pieces, width)

    def own_scores(
        self, query: Tensor, keys: Tensor, spans: SpanLengths, scores: Tensor
    ) -> None:
        query = query.contiguous()
        buffers = _buffers(spans, keys, scores)
        at = query.data_ptr(), keys.data_ptr(), scores.data_ptr()
        self._own_scores(ctypes.byref(buffers), *at, query.shape[2])

    def join_softmax(self, shared: Tensor, own: Tensor, spans: SpanLengths) -> None:
        buffers = _buffers(spans, own, own)
        at = shared.data_ptr(), own.data_ptr()
        self._join_softmax(ctypes.byref(buffers), *at, shared.shape[2])

    def own_values(self, weights: Tensor, values: Tensor, spans: SpanLengths) -> Tensor:
        dim = values.shape[2]
        if dim > _WIDEST:
            return torch.bmm(weights, values)
        out = weights.new_empty(*weights.shape[:2], dim)
        buffers = _buffers(spans, values, weights)
        at = weights.data_ptr(), values.data_ptr(), out.data_ptr()
        self._own_values(ctypes.byref(buffers), *at, dim)
        return out

    def causal_softmax(self, scores: Tensor, seen: int) -> None:
        *heads, queries, keys = scores.shape
        self._causal_softmax(scores.data_ptr(), math.prod(heads), queries, keys, seen)


class _Buffers(ctypes.Structure):
    """`Buffers` of the C source."""

    _fields_ = (
        ("lengths", _P),
        *((name, _I) for name in ("buffers", "kv_heads", "queries", "stride", "width", "span")),
    )


def _buffers(spans: SpanLengths, held: Tensor, scores: Tensor) -> _Buffers:
    """The lengths and strides that the C source needs. Rows of keys, values and scores are
    dense."""
    lengths = spans.lengths
    return _Buffers(
        *(lengths.data_ptr(), len(lengths), spans.kv_heads),
        *(scores.shape[1], held.stride(0), scores.stride(1), scores.shape[2]),
    )


def load() -> NativeOps | None:
    """The compiled operations; compiled now if necessary. None if that fails."""
    library = open_library(_SOURCE, _FLAGS, "small operations run in torch, more slowly")
    return None if library is None else NativeOps(library)


def _function(library: ctypes.CDLL, name: str, *types: type) -> "ctypes._NamedFuncPointer":
    function = getattr(library, name)
    function.argtypes, function.restype = types, None
    return function  # type: ignore[no-any-return]  # what a CDLL has
