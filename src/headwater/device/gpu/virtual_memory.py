"""Device memory that other processes of this machine can map: the driver's virtual memory calls.

    create ─▶ handle ─▶ map at an address ─▶ tensor           the owner
                └─ export ─▶ file descriptor ─ import ─▶ map  a peer

The driver frees the memory when its last handle and mapping are gone, in whichever process. A
mapping therefore stays valid when the owner dies. Torch's allocator does not provide such
memory. The memory that it provides could only be shared by the older IPC calls. Their handle is
a number that any process may use again, and they do not work within one process.
"""

import os
import weakref
from typing import Any

import torch
from torch import Tensor

from headwater.errors import ConfigError, DeviceError


class Driver:
    """The driver calls of one device. They need a current context, which torch makes."""

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as exc:
            raise ConfigError(
                "memory that peers can map needs the package cuda-bindings; "
                "try: pip install 'headwater[gpu]'"
            ) from exc
        self.cuda: Any = driver
        self.device = device
        self._index = device.index or 0
        self.kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def properties(self) -> Any:  # noqa: ANN401 -- a struct of the driver
        """Memory of this device that can be exported as a file descriptor."""
        wanted = self.cuda.CUmemAllocationProp()
        wanted.type = self.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location()
        wanted.requestedHandleTypes = self.kind
        return wanted

    def access(self) -> Any:  # noqa: ANN401
        """Reads and writes by this device. The driver offers no read-only mapping of a peer's
        memory; the copier is the only code that gets its address."""
        allowed = self.cuda.CUmemAccessDesc()
        allowed.location = self._location()
        allowed.flags = self.cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return allowed

    def is_near(self, handle: Any) -> bool:  # noqa: ANN401
        """Whether memory is on this device."""
        found = self.call("cuMemGetAllocationPropertiesFromHandle", handle)
        return int(found.location.id) == self._index

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Call a function of the driver; returns its result. Raises DeviceError with its name."""
        code, *results = getattr(self.cuda, name)(*arguments)
        if code != self.cuda.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name} failed: {code!r}")
        return results[0] if results else None

    def _location(self) -> Any:  # noqa: ANN401
        location = self.cuda.CUmemLocation()
        location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index
        return location


class MappedMemory:
    """Device memory with an address in this process. It is unmapped with this object."""

    def __init__(self, driver: Driver, handle: Any, num_bytes: int) -> None:  # noqa: ANN401
        """Takes ownership of `handle`."""
        try:
            self.is_near = driver.is_near(handle)
            """Whether the memory is on the driver's own device."""

            address = driver.call("cuMemAddressReserve", num_bytes, 0, 0, 0)
            try:
                driver.call("cuMemMap", address, num_bytes, 0, handle, 0)
                try:
                    driver.call("cuMemSetAccess", address, num_bytes, [driver.access()], 1)
                except BaseException:
                    driver.call("cuMemUnmap", address, num_bytes)
                    raise
            except BaseException:
                driver.call("cuMemAddressFree", address, num_bytes)
                raise
        except BaseException:
            driver.call("cuMemRelease", handle)
            raise
        self.address = int(address)
        self.num_bytes = num_bytes
        self._free = weakref.finalize(self, _unmap, driver, handle, address, num_bytes)
        self._free.atexit = False  # the driver frees everything when the process ends

    def close(self) -> None:
        """Unmap the memory. The device must not use it any more. Calling it twice is safe."""
        self._free()

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """The leading bytes as a tensor, which keeps this object alive."""
        return torch.as_tensor(_ArrayInterface(self, shape))


class _ArrayInterface:
    """What torch needs to make a tensor of memory that is not its own."""

    def __init__(self, memory: MappedMemory, shape: tuple[int, ...]) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


class ExportedMemory:
    """New device memory and the descriptor with which peers can map it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises DeviceError if there is not enough memory, or none that can be exported."""
        torch.cuda.synchronize(device)  # creates the context
        torch.cuda.empty_cache()  # memory that torch keeps for later is not free for the driver
        driver = Driver(device)
        wanted = driver.properties()
        smallest = driver.cuda.CUmemAllocationGranularity_flags
        granularity = driver.call(
            "cuMemGetAllocationGranularity",
            wanted,
            smallest.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self.num_bytes = -(-num_bytes // granularity) * granularity
        """Size of the memory: `num_bytes`, rounded up."""

        handle = driver.call("cuMemCreate", self.num_bytes, wanted, 0)
        self.mapped = MappedMemory(driver, handle, self.num_bytes)
        self.file = int(driver.call("cuMemExportToShareableHandle", handle, driver.kind, 0))
        """Descriptor of the memory. A process that has it can read and write all of it."""

        weakref.finalize(self, os.close, self.file)


def import_memory(file: int, num_bytes: int, device: torch.device) -> MappedMemory:
    """Map the memory behind a descriptor that another process exported. Raises DeviceError if
    it is smaller, or if `device` cannot reach it. The descriptor may be closed afterwards."""
    driver = Driver(device)
    handle = driver.call("cuMemImportFromShareableHandle", file, driver.kind)
    return MappedMemory(driver, handle, num_bytes)


def _unmap(driver: Driver, handle: Any, address: Any, num_bytes: int) -> None:  # noqa: ANN401
    torch.cuda.synchronize(driver.device)
    driver.call("cuMemUnmap", address, num_bytes)
    driver.call("cuMemAddressFree", address, num_bytes)
    driver.call("cuMemRelease", handle)
