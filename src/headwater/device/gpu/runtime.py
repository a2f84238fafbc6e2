"""The few CUDA runtime calls that torch does not offer, through cuda-python."""

from collections.abc import Sequence
from typing import Any

from headwater.errors import ConfigError, DeviceError


class Runtime:
    """Pinned memory and batched copies. Calls may block; they release the interpreter lock."""

    def __init__(self, device: int) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as exc:
            raise ConfigError(
                "copies between a GPU and the host need the package cuda-bindings; "
                "try: pip install 'headwater[gpu]'"
            ) from exc
        self._cuda: Any = runtime
        self._device = device
        self._attributes = runtime.cudaMemcpyAttributes()
        order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes.srcAccessOrder = order

    def enter_thread(self) -> None:
        """Use this device for all further calls of this thread."""
        self._check(self._cuda.cudaSetDevice(self._device), "cudaSetDevice")

    def pin(self, address: int, num_bytes: int, *, read_only: bool = False) -> None:
        """Lock pages in memory and register them with the device. Pages that this process has
        mapped read-only need `read_only`; the device must not write to them."""
        flags = self._cuda.cudaHostRegisterReadOnly if read_only else 0
        self._check(self._cuda.cudaHostRegister(address, num_bytes, flags), "cudaHostRegister")

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._check(self._cuda.cudaHostUnregister(address), "cudaHostUnregister")

    def copy(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Queue copies of this many bytes on a stream; they have no order among themselves."""
        count = len(targets)
        done = self._cuda.cudaMemcpyBatchAsync(
            list(targets), list(sources), list(sizes), count, [self._attributes], [0], 1,
            stream,
        )  # fmt: skip
        self._check(done, "cudaMemcpyBatchAsync")

    def copy_rows(
        self,
        target: tuple[int, int],
        source: tuple[int, int],
        shape: tuple[int, int],
        stream: int,
    ) -> None:
        """Queue a copy of `shape` = (rows, bytes per row). Each side is an address and the
        distance between rows."""
        num_rows, num_bytes = shape
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDefault
        done = self._cuda.cudaMemcpy2DAsync(*target, *source, num_bytes, num_rows, kind, stream)
        self._check(done, "cudaMemcpy2DAsync")

    def _check(self, returned: tuple[Any, ...], name: str) -> None:
        if returned[0] != self._cuda.cudaError_t.cudaSuccess:
            # torch would raise this thread's last error again after its next kernel.
            self._cuda.cudaGetLastError()
            raise DeviceError(f"{name} failed: {returned[0]!r}")
