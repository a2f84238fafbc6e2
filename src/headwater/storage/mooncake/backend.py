"""Blocks in a Mooncake pool: the memory of many machines, reached over TCP or RDMA.

Every process that opens it lends a segment of its memory to the pool and can find the blocks of
all others; a `mooncake_master` knows where they are. Payloads are transferred directly between
the pool and the caller's buffers. The calls are C++ and cannot be interrupted, so they run in
I/O threads: the caller stops waiting for a call that hangs, and an event tells when the call
does not use the buffers any more.
"""

import contextlib
import ctypes
import mmap
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import local
from typing import Any, Self, TypeVar

from headwater.clock import Clock
from headwater.errors import ConfigError, StorageCorrupt, StorageError, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, Opening, StorageStats, leading
from headwater.storage.calls import Deadline, StorageCounters, address_of
from headwater.storage.codec import HEADER_BYTES, BlockFormat, encode_header, verify_block
from headwater.storage.io_threads import IoThreads
from headwater.storage.mooncake.config import MooncakeConfig, mooncake_config
from headwater.types import BlockKey

T = TypeVar("T")
W = TypeVar("W")

_BATCH_BLOCKS = 16
_ABSENT = frozenset({-704, -703})
"""Codes of a key that is absent or is being written."""

_NO_ROOM = -200

_NO_REQUEST = bytes(64)
"""Bytes that are not a request in Mooncake's protocol, so that a running master closes the
connection.
"""


class MooncakeStorage:
    """A member of one Mooncake pool."""

    def __init__(
        self,
        config: MooncakeConfig,
        form: BlockFormat,
        clock: Clock,
        memory: memoryview | None = None,
    ) -> None:
        """Join the pool. Raises StorageTimeout if the master does not answer, ConfigError if
        joining fails."""
        self._config = config
        self._form = form
        self._clock = clock
        self._counters = StorageCounters("mooncake", form.block_bytes)
        self._io_threads = IoThreads("mooncake storage", config.num_threads)
        self._headers = local()
        self._closed = False
        self._store = _import_store()()
        self._memory = (0, 0)
        self._join(memory)

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        config = mooncake_config(settings, opening.environ)
        return cls(config, opening.format, opening.clock, opening.memory)

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        keys = [key for run in runs for key in run]
        present = self._call(partial(self._exist, keys), self._deadline(timeout_s))
        return leading(runs, present)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._form.check(into)
        work = list(zip(keys, into, strict=True))
        return self._counters.count_reads(self._in_batches(self._read, work, timeout_s))

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        self._form.check(blocks)
        work = list(zip(keys, blocks, parents, strict=True))
        return self._counters.count_writes(self._in_batches(self._write, work, timeout_s))

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        """None removes all blocks with our prefix, because the pool can only be searched by
        name."""
        work = partial(self._remove, keys) if keys is not None else self._remove_all
        return self._call(work, self._deadline(timeout_s))

    def stats(self) -> StorageStats:
        return self._counters.stats(threads_lost=self._io_threads.num_lost)

    def close(self) -> None:
        """Leave the pool. The memory that this process lent is removed from it."""
        if self._closed:
            return
        self._closed = True
        if self._may_leave():
            with contextlib.suppress(StorageError):
                self._io_threads.run([self._store.close], timeout_s=self._config.join_timeout_s)
        else:
            # Closing the store under a call that hangs would crash the process. Closing or
            # destroying it without a master that answers holds the interpreter lock, and so stops
            # every thread: it is left open.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        self._io_threads.close()

    def _join(self, memory: memoryview | None) -> None:
        config = self._config
        join = partial(
            self._store.setup,
            config.local_hostname,
            config.metadata_server,
            config.segment_bytes,
            config.buffer_bytes,
            config.protocol,
            config.rdma_devices,
            config.master,
        )
        try:
            # `setup` holds the interpreter lock: without a master that answers it would stop
            # every thread of the process, for minutes or for ever.
            code: int | str = "no process listens there"
            if self._master_answers():
                [code] = self._io_threads.run([join], timeout_s=config.join_timeout_s)
            if code != 0:
                raise ConfigError(
                    f"cannot join the Mooncake pool of the master at {config.master} (code {code}); "
                    "check that mooncake_master runs there"
                )
        except BaseException:
            self._closed = True
            self._io_threads.close()
            raise
        if memory is not None:
            start = address_of(memory)
            if self._store.register_buffer(start, len(memory)) != 0:
                self.close()
                raise ConfigError(
                    "Mooncake cannot register the host slab; check ulimit -l and the RDMA devices"
                )
            self._memory = (start, start + len(memory))

    def _master_answers(self) -> bool:
        """Whether the master answers. False if no process listens; raises StorageTimeout if one
        listens but does not answer. The kernel accepts connections of a stopped master."""
        host, _, port = self._config.master.rpartition(":")
        if not port.isdigit():
            # another kind of address, such as etcd://, that only Mooncake understands
            return True
        try:
            address = (host.strip("[]"), int(port))
            with socket.create_connection(address, self._config.join_timeout_s) as link:
                link.sendall(_NO_REQUEST)
                link.recv(1)
        except TimeoutError as error:
            raise StorageTimeout(
                f"the Mooncake master at {self._config.master} did not answer within "
                f"{self._config.join_timeout_s:g} s"
            ) from error
        except ConnectionResetError:
            return True
        except OSError:
            return False
        return True

    def _may_leave(self) -> bool:
        """Whether the store can be closed: no call hangs in it, and the master answers."""
        if not self._io_threads.drain(self._config.join_timeout_s):
            return False
        try:
            return self._master_answers()
        except StorageTimeout:
            return False

    def _call(self, call: Callable[[], T], deadline: Deadline) -> T:
        [answer] = self._run([call], deadline)
        return answer

    def _in_batches(
        self, call: Callable[[Sequence[W]], list[T]], work: Sequence[W], timeout_s: float
    ) -> list[T]:
        """The results of `call` for batches of `work`. Batches run in several threads, so some
        blocks are verified or sealed while others are transferred."""
        starts = range(0, len(work), _BATCH_BLOCKS)
        calls = [partial(call, work[start : start + _BATCH_BLOCKS]) for start in starts]
        batches = self._run(calls, self._deadline(timeout_s))
        return [outcome for batch in batches for outcome in batch]

    def _run(self, calls: Sequence[Callable[[], T]], deadline: Deadline) -> list[T]:
        if self._closed:
            raise StorageError("mooncake storage is closed")
        return self._io_threads.run(calls, timeout_s=deadline.left_s())

    def _exist(self, keys: Sequence[BlockKey]) -> list[bool]:
        if not keys:
            return []
        answers = self._store.batch_is_exist([self._name(key) for key in keys])
        if any(answer < 0 for answer in answers):
            raise StorageError(f"the Mooncake master at {self._config.master} does not answer")
        return [answer == 1 for answer in answers]

    def _read(self, work: Sequence[tuple[BlockKey, memoryview]]) -> list[BlockRead]:
        names = [self._name(key) for key, _ in work]
        views = [view for _, view in work]
        headers = self._header_buffers(len(work))
        with self._registered(views):
            pointers, sizes = _gather(headers, views)
            codes = self._store.batch_get_into_multi_buffers(names, pointers, sizes)
        self._raise_if_dead(codes)
        outcomes = [
            self._verified(key, header, view, code)
            for (key, view), header, code in zip(work, headers, codes, strict=True)
        ]
        damaged = [
            name for name, got in zip(names, outcomes, strict=True) if got is BlockRead.DAMAGED
        ]
        if damaged:
            # A key is never rewritten, so a damaged block must be removed first.
            self._store.batch_remove(damaged, True)
        return outcomes

    def _verified(
        self, key: BlockKey, header: memoryview, view: memoryview, code: int
    ) -> BlockRead:
        if code in _ABSENT:
            return BlockRead.ABSENT
        if code < 0:
            return self._failed(key)
        try:
            verify_block(header, view, form=self._form, key=key)
        except StorageCorrupt as error:
            self._counters.count_failure(error.reason)
            return BlockRead.DAMAGED
        return BlockRead.READ

    def _failed(self, key: BlockKey) -> BlockRead:
        """The result for a block that exists but could not be read: it has another size or is
        on a dead machine."""
        there = self._store.get_size(self._name(key))
        if there >= 0 and there != HEADER_BYTES + self._form.block_bytes:
            self._counters.count_failure("bad_length")
            return BlockRead.DAMAGED
        self._counters.count_failure("transfer_failed")
        return BlockRead.ABSENT

    def _write(self, work: Sequence[tuple[BlockKey, memoryview, BlockKey]]) -> list[BlockWrite]:
        present = self._exist([key for key, _, _ in work])
        missing = {one[0]: one for one, there in zip(work, present, strict=True) if not there}
        stored = self._put(list(missing.values())) if missing else []
        fresh = dict(zip(missing, stored, strict=True))
        return [fresh.pop(key, BlockWrite.PRESENT) for key, _, _ in work]

    def _put(self, work: Sequence[tuple[BlockKey, memoryview, BlockKey]]) -> list[BlockWrite]:
        headers = self._header_buffers(len(work))
        for (key, block, parent), header in zip(work, headers, strict=True):
            header[:] = encode_header(self._form, key, parent, block)
        views = [block for _, block, _ in work]
        with self._registered(views):
            pointers, sizes = _gather(headers, views)
            codes = self._store.batch_put_from_multi_buffers(
                [self._name(key) for key, _, _ in work], pointers, sizes
            )
        self._raise_if_dead([code for code in codes if code != _NO_ROOM])
        for code in codes:
            if code != 0:
                self._counters.count_failure(
                    "no_room" if code == _NO_ROOM else "transfer_failed"
                )
        return [BlockWrite.WRITTEN if code == 0 else BlockWrite.REFUSED for code in codes]

    def _remove(self, keys: Sequence[BlockKey]) -> int:
        # Forced: every lookup of a block leases it for seconds, which would prevent its
        # removal.
        codes = self._store.batch_remove([self._name(key) for key in keys], True)
        self._raise_if_dead(codes)
        return sum(code == 0 for code in codes)

    def _remove_all(self) -> int:
        removed = int(
            self._store.remove_by_regex(f"^{re.escape(self._config.key_prefix)}.*", True)
        )
        if removed < 0:
            raise StorageError(f"the Mooncake pool of {self._config.master} failed: {removed}")
        return removed

    def _raise_if_dead(self, codes: Sequence[int]) -> None:
        """Raise StorageError if all blocks failed: then the pool has failed. A single failed
        block is a miss."""
        if codes and all(code < 0 and code not in _ABSENT for code in codes):
            raise StorageError(f"the Mooncake pool of {self._config.master} failed: {codes[0]}")

    def _header_buffers(self, count: int) -> list[memoryview]:
        """Registered memory of this thread, one header each."""
        buffers: list[memoryview] | None = getattr(self._headers, "buffers", None)
        if buffers is None:
            view = memoryview(mmap.mmap(-1, _BATCH_BLOCKS * HEADER_BYTES))
            self._store.register_buffer(address_of(view), len(view))
            buffers = [view[at : at + HEADER_BYTES] for at in range(0, len(view), HEADER_BYTES)]
            self._headers.buffers = buffers
        return buffers[:count]

    @contextlib.contextmanager
    def _registered(self, views: Sequence[memoryview]) -> Iterator[None]:
        """Register buffers outside the slab for one call."""
        start, end = self._memory
        spans = [(address_of(view), len(view)) for view in views]
        strange = [at for at, size in spans if not start <= at <= at + size <= end]
        sizes = dict(spans)
        for at in strange:
            self._store.register_buffer(at, sizes[at])
        try:
            yield
        finally:
            for at in strange:
                self._store.unregister_buffer(at)

    def _name(self, key: BlockKey) -> str:
        return self._config.key_prefix + key.hex()

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline(self._clock, timeout_s, "mooncake storage")


def _gather(
    headers: Sequence[memoryview], views: Sequence[memoryview]
) -> tuple[list[list[int]], list[list[int]]]:
    """Each block as the addresses and lengths of its two parts."""
    pairs = list(zip(headers, views, strict=True))
    pointers = [[address_of(header), address_of(view)] for header, view in pairs]
    return pointers, [[len(header), len(view)] for header, view in pairs]


def _import_store() -> Callable[[], Any]:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise ConfigError(
            "storage backend 'mooncake' needs: pip install 'headwater[mooncake]'"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"storage backend 'mooncake' cannot be loaded: {error}; "
            "on Debian: apt-get install libibverbs1"
        ) from error
    store: Callable[[], Any] = MooncakeDistributedStore
    return store
