"""Matrix products compiled from `gemm.c`, for weights in float32 on a CPU.

They use the threads that torch is allowed to use: the library needs the OpenMP runtime by the
name under which torch has already loaded its own.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.native.compiler import open_library

_SOURCE = Path(__file__).with_name("gemm.c")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
_P, _I = ctypes.c_void_p, ctypes.c_int64

STORE, SILU, TIMES, PLUS = range(4)
"""What is done with a product: nothing, SiLU, or an operation with another tensor."""

_log = logging.getLogger(__name__)


class _Product(ctypes.Structure):
    """`Product` of the C source."""

    _fields_ = (
        *((name, _P) for name in ("x", "packed", "bias", "other", "out")),
        *((name, _I) for name in ("rows", "width", "depth", "op")),
    )


class Gemm:
    """Packs weights into panels and multiplies with them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.panel_width.restype = _I
        self._panel: int = library.panel_width()
        self._pack = library.pack_panels
        self._pack.argtypes, self._pack.restype = (_P, _P, _I, _I), None
        self._multiply = library.multiply
        self._multiply.argtypes, self._multiply.restype = (_P,), None

    def pack(self, weight: Tensor) -> Tensor:
        """A copy of `weight`, `[width, depth]`, as `[panels, depth, panel width]`."""
        weight = weight.detach().contiguous()
        width, depth = weight.shape
        packed = weight.new_empty(-(-width // self._panel), depth, self._panel)
        self._pack(weight.data_ptr(), packed.data_ptr(), width, depth)
        return packed

    def multiply(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        width: int,
        op: int = STORE,
        other: Tensor | None = None,
    ) -> Tensor:
        """`op(x @ weight.T + bias)`; `other` has the shape of the result."""
        x = x.contiguous()
        other = None if other is None else other.contiguous()
        depth = x.shape[-1]
        out = x.new_empty(*x.shape[:-1], width)
        product = _Product(
            *(x.data_ptr(), packed.data_ptr()),
            None if bias is None else bias.data_ptr(),
            None if other is None else other.data_ptr(),
            out.data_ptr(),
            *(x.numel() // depth, width, depth, op),
        )
        self._multiply(ctypes.byref(product))
        return out


@cache
def load_gemm() -> Gemm | None:
    """The compiled products; compiled now if necessary. None if that fails or a result is
    wrong."""
    library = open_library(_SOURCE, _FLAGS, "matrix products run in torch, more slowly")
    if library is None:
        return None
    gemm = Gemm(library)
    x, weight = torch.randn(11, 40), torch.randn(72, 40)
    ours = gemm.multiply(x, gemm.pack(weight), None, 72)
    if torch.allclose(ours, F.linear(x, weight), rtol=1e-4, atol=1e-4):
        return gemm
    _log.warning("matrix products run in torch, more slowly: the compiled ones are wrong")
    return None
