"""A storage backend with scripted failures, and media whose bytes can be damaged.

There are two kinds of faults. Faults of calls: an error, a timeout, a call that hangs or never
returns, a death in the middle. Faults of bytes: the medium below a backend is changed, and the
backend must detect it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from threading import Event, Lock, Thread
from typing import Protocol, TypeVar

from headwater.errors import StorageError, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend, StorageStats
from headwater.storage.codec import HEADER_BYTES, BlockFormat, decode_header, encode_header
from headwater.types import BlockKey

T = TypeVar("T")


class Fault(Enum):
    """What goes wrong in one call."""

    ERROR = auto()
    """It raises, having done nothing."""

    TIMEOUT = auto()
    """It raises StorageTimeout, and uses no buffer afterwards."""

    HANG = auto()
    """It raises StorageTimeout when its time is up, and finishes its work after `release()`."""

    NEVER = auto()
    """It neither returns nor raises before `release()`, whatever its timeout is."""

    REFUSED = auto()
    """A write finds the medium full. Other calls are not affected."""

    DIES = auto()
    """It does half of its work and raises; so do all later calls, until `revive()`."""

    TRUNCATED = auto()
    """The end of the first block is missing."""

    FLIPPED_BIT = auto()
    """One bit of the first block is flipped."""

    SWAPPED = auto()
    """The first two blocks are swapped."""

    OTHER_MODEL = auto()
    """The first block belongs to another model; it is complete and has the right key."""


BYTE_FAULTS = (Fault.TRUNCATED, Fault.FLIPPED_BIT, Fault.SWAPPED, Fault.OTHER_MODEL)


class Medium(Protocol):
    """The bytes below a backend: header and payload of each block."""

    def fetch(self, key: BlockKey) -> bytes: ...

    def replace(self, key: BlockKey, value: bytes) -> None: ...


class FaultyStorage:
    """Passes every call on to `backend`, unless the script has a fault for it.

    The script has a list for each of `contains`, `read`, `write`, `remove`: the n-th call of
    that name gets the n-th entry; None means no fault. Thread-safe.
    """

    def __init__(
        self,
        backend: StorageBackend,
        script: Mapping[str, Sequence[Fault | None]],
        medium: Medium | None = None,
    ) -> None:
        """`medium` is the medium below `backend`; only faults of bytes need it."""
        self._backend = backend
        self._script = {name: list(faults) for name, faults in script.items()}
        self._medium = medium
        self._lock = Lock()
        self._released = Event()
        self._dead = False

    def release(self) -> None:
        """Let every hanging call finish its work now."""
        self._released.set()

    def revive(self) -> None:
        """Let a backend that died work again."""
        self._dead = False

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        return self._meet(
            "contains",
            [key for run in runs for key in run],
            timeout_s,
            lambda _: self._backend.contains(runs, timeout_s=timeout_s),
        )

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        return self._meet(
            "read",
            keys,
            timeout_s,
            lambda n: self._backend.read(keys[:n], into[:n], timeout_s=timeout_s),
        )

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        def work(count: int) -> list[BlockWrite]:
            return self._backend.write(
                keys[:count], blocks[:count], parents=parents[:count], timeout_s=timeout_s
            )

        if self._peek("write") is Fault.REFUSED:
            self._next("write")
            return [BlockWrite.REFUSED] * len(keys)
        return self._meet("write", keys, timeout_s, work)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        return self._meet(
            "remove",
            keys or (),
            timeout_s,
            lambda n: self._backend.remove(
                None if keys is None else keys[:n], timeout_s=timeout_s
            ),
        )

    def stats(self) -> StorageStats:
        return self._backend.stats()

    def close(self) -> None:
        """Close the backend and end hanging calls, so that no thread is left behind."""
        self.release()
        self._backend.close()

    def _meet(
        self, name: str, keys: Sequence[BlockKey], timeout_s: float, work: Callable[[int], T]
    ) -> T:
        fault = self._next(name)
        if self._dead or fault is Fault.ERROR:
            raise StorageError(f"{name} failed (scripted fault)")
        if fault is Fault.TIMEOUT:
            raise StorageTimeout(f"{name} timed out (scripted fault)")
        if fault is Fault.NEVER:
            self._released.wait()
            raise StorageError(f"{name} never answered (scripted fault)")
        if fault is Fault.HANG:
            return self._hang(name, timeout_s, lambda: work(len(keys)))
        if fault is Fault.DIES:
            self._dead = True
            work(len(keys) // 2)
            raise StorageError(f"{name} died in the middle (scripted fault)")
        if fault in BYTE_FAULTS:
            assert self._medium is not None, f"{fault} needs the medium below"
            damage(self._medium, keys, fault)
        return work(len(keys))

    def _hang(self, name: str, timeout_s: float, work: Callable[[], T]) -> T:
        quiet = Event()
        answers: list[T] = []

        def late() -> None:
            self._released.wait()
            try:
                answers.append(work())
            finally:
                quiet.set()

        Thread(target=late, daemon=True).start()
        if not quiet.wait(timeout_s):
            raise StorageTimeout(f"{name} hangs (scripted fault)", quiet=quiet)
        return answers[0]

    def _next(self, name: str) -> Fault | None:
        with self._lock:
            faults = self._script.get(name)
            return faults.pop(0) if faults else None

    def _peek(self, name: str) -> Fault | None:
        with self._lock:
            faults = self._script.get(name)
            return faults[0] if faults else None


def damage(medium: Medium, keys: Sequence[BlockKey], fault: Fault) -> None:
    """Damage the bytes of `keys` as the fault says."""
    first = medium.fetch(keys[0])
    if fault is Fault.TRUNCATED:
        medium.replace(keys[0], first[: len(first) - len(first) // 3])
    elif fault is Fault.FLIPPED_BIT:
        middle = HEADER_BYTES + (len(first) - HEADER_BYTES) // 2
        medium.replace(
            keys[0], first[:middle] + bytes([first[middle] ^ 4]) + first[middle + 1 :]
        )
    elif fault is Fault.SWAPPED:
        second = medium.fetch(keys[1])
        medium.replace(keys[0], second)
        medium.replace(keys[1], first)
    elif fault is Fault.OTHER_MODEL:
        header, payload = decode_header(first), memoryview(first)[HEADER_BYTES:]
        # The new fingerprint is a hash of the old one, so that damaging a block twice cannot
        # restore its first fingerprint: the new header would make the block valid again.
        fingerprint = hashlib.sha256(header.fingerprint).digest()
        other = BlockFormat(fingerprint=fingerprint, block_bytes=len(payload))
        medium.replace(
            keys[0], encode_header(other, header.key, header.parent, payload) + payload
        )
    else:
        raise ValueError(f"{fault} is not a fault of bytes")
