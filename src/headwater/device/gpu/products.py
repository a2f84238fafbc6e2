"""Products of many rows by the fastest of the algorithms that cuBLASLt offers for them.

cuBLAS takes the one it guesses to be best; with thousands of rows on a busy device its guess
is a few hundredths slower than the best. Sizes that come often are tried once, at start.
"""

import ctypes
import re
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WORKSPACE_BYTES = 64 << 20
_CANDIDATES = 8
_ROUNDS = 5
_LIBRARY = re.compile(r"/\S*libcublasLt\.so\S*")

_COMPUTE_32F, _R_32F, _R_16BF, _R_16F = 68, 0, 14, 2
_DATA = {torch.bfloat16: _R_16BF, torch.float16: _R_16F}
_TRANSPOSE_A, _MAX_WORKSPACE = 3, 1
"""Numbers of cublasLt.h."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Shape(NamedTuple):
    num_rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype


class _Plan:
    """How a product of one shape is described to the library."""

    def __init__(self, library: "_Library", shape: _Shape) -> None:
        rows, inputs, outputs, dtype = shape
        self.description = library.make("cublasLtMatmulDescCreate", _COMPUTE_32F, _R_32F)
        library.set("cublasLtMatmulDescSetAttribute", self.description, _TRANSPOSE_A, 1)
        # The library counts by columns: rows of ours are columns of its.
        sizes = ((inputs, outputs), (inputs, rows), (outputs, rows))
        self.layouts = [
            library.make(
                "cublasLtMatrixLayoutCreate", _DATA[dtype], *map(ctypes.c_uint64, (a, b, a))
            )
            for a, b in sizes
        ]


class _Library:
    """The calls of libcublasLt that are needed here; the library is torch's own."""

    def __init__(self, path: str) -> None:
        self.calls: Any = ctypes.CDLL(path)
        self.handle = self.make("cublasLtCreate")

    def make(self, name: str, *given: object) -> ctypes.c_void_p:
        """What a function of that name creates."""
        made = ctypes.c_void_p()
        self.check(self.calls[name](ctypes.byref(made), *given))
        return made

    def set(self, name: str, what: ctypes.c_void_p, attribute: int, value: int) -> None:
        """Set an attribute of four bytes, or of eight if it is a number of bytes."""
        of_bytes = attribute == _MAX_WORKSPACE
        given = ctypes.c_uint64(value) if of_bytes else ctypes.c_int(value)
        size = ctypes.c_size_t(ctypes.sizeof(given))
        self.check(self.calls[name](what, attribute, ctypes.byref(given), size))

    def candidates(self, plan: _Plan) -> list[_Found]:
        """Algorithms for a plan, the library's favourite first."""
        wanted = self.make("cublasLtMatmulPreferenceCreate")
        self.set(
            "cublasLtMatmulPreferenceSetAttribute", wanted, _MAX_WORKSPACE, _WORKSPACE_BYTES
        )
        found, count = (_Found * _CANDIDATES)(), ctypes.c_int()
        weight, x, out = plan.layouts
        self.check(
            self.calls.cublasLtMatmulAlgoGetHeuristic(
                self.handle, plan.description, weight, x, out, out, wanted, _CANDIDATES, found,
                ctypes.byref(count),
            )
        )  # fmt: skip
        self.check(self.calls.cublasLtMatmulPreferenceDestroy(wanted))
        return [found[number] for number in range(count.value)]

    @staticmethod
    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLASLt answered {status}")


class Products:
    """`out (+)= x @ weight.T`; shapes that were tuned take the algorithm found best."""

    def __init__(self, device: torch.device) -> None:
        path = _library_path(device)
        self._library = _Library(path) if path is not None else None
        self._device = device
        self._workspace: Tensor | None = None
        self._best: dict[_Shape, tuple[_Plan, _Found]] = {}

    def tune(self, num_rows: int, weight: Tensor) -> None:
        """Try what there is for so many rows; some tenths of a second."""
        shape = _Shape(num_rows, weight.shape[1], weight.shape[0], weight.dtype)
        if self._library is None or shape in self._best or weight.dtype not in _DATA:
            return
        if self._workspace is None:
            self._workspace = torch.empty(
                _WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
            )
        plan = _Plan(self._library, shape)
        x = torch.randn((num_rows, shape.inputs), dtype=weight.dtype, device=self._device)
        out = x.new_empty((num_rows, shape.outputs))
        found = self._library.candidates(plan)
        taken: list[list[float]] = [[] for _ in found]
        for _ in range(_ROUNDS):
            for times, candidate in zip(taken, found, strict=True):
                times.append(self._time(plan, candidate, x, weight, out))
        if found:
            best = min(range(len(found)), key=lambda number: median(taken[number]))
            self._best[shape] = plan, found[best]

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, *, adds: bool = False) -> None:
        """Put the product into `out`, which is contiguous, or add it to what is there."""
        known = self._best.get(_Shape(len(x), x.shape[1], len(weight), x.dtype))
        if known is not None and x.is_contiguous():
            self._run(*known, x, weight, out, adds=adds)
        elif adds:
            out.addmm_(x, weight.T)
        else:
            torch.mm(x, weight.T, out=out)

    def _time(
        self, plan: _Plan, found: _Found, x: Tensor, weight: Tensor, out: Tensor
    ) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        self._run(plan, found, x, weight, out, adds=False)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    def _run(
        self, plan: _Plan, found: _Found, x: Tensor, weight: Tensor, out: Tensor, *, adds: bool
    ) -> None:
        library, workspace = self._library, self._workspace
        assert library is not None, "nothing was tuned"
        assert workspace is not None, "nothing was tuned"
        one, kept = ctypes.c_float(1.0), ctypes.c_float(1.0 if adds else 0.0)
        given = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out)]
        layouts = plan.layouts
        library.check(
            library.calls.cublasLtMatmul(
                library.handle, plan.description, ctypes.byref(one),
                given[0], layouts[0], given[1], layouts[1], ctypes.byref(kept),
                given[2], layouts[2], given[2], layouts[2], ctypes.byref(found.algorithm),
                ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE_BYTES),
                ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
            )
        )  # fmt: skip


def _library_path(device: torch.device) -> str | None:
    """Where torch's own cuBLASLt was loaded from; None where that cannot be told."""
    if device.type != "cuda":
        return None
    one = torch.ones((16, 16), device=device)
    torch.mm(one, one)  # torch loads it when it is first needed
    maps = Path("/proc/self/maps")
    found = _LIBRARY.search(maps.read_text()) if maps.exists() else None
    return None if found is None else found.group()
