"""Blocks on a Redis or Valkey server, one string per block: header, then payload.

Bounded by the server: `maxmemory` with an eviction policy such as `allkeys-lru`, or a time to
live that every read renews. Batches are pipelined over one connection per thread. A connection
that broke since its last use is replaced, and the batch is sent again, once.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Self, TypeVar

from headwater.clock import Clock
from headwater.errors import ConfigError, StorageCorrupt, StorageError, StorageTimeout
from headwater.storage.base import BlockRead, BlockWrite, Opening, StorageStats, leading
from headwater.storage.calls import Deadline, StorageCounters
from headwater.storage.codec import (
    FINGERPRINT_BYTES,
    HEADER_BYTES,
    BlockFormat,
    encode_header,
    verify_block,
)
from headwater.storage.redis.config import RedisConfig, tls_context
from headwater.storage.redis.probe import check_server
from headwater.storage.redis.resp import Address, ReplyError, RespConnection, command
from headwater.storage.settings import read_settings
from headwater.types import BlockKey

T = TypeVar("T")

log = logging.getLogger(__name__)

_WINDOW_BYTES = 4 << 20
"""Bytes of payload that are requested but not read yet, which the server must buffer. With
blocks of 1 MiB, 16 requested blocks were read at 0.7 of the speed of a bare socket, 8 at 0.85,
2 or 3 at 0.9 to 1: more data than the processor's cache holds is written to memory and read
again."""

_MAX_IDLE = 32
_DRAIN_BYTES = 1 << 16
_CHECK_TIMEOUT_S = 5.0
_MAX_VALUE_BYTES = 1 << 30
"""A foreign value under the name of a block is read and dropped up to this length; a longer one
is an error, which closes the connection."""


class RedisStorage:
    """A client of one server."""

    def __init__(self, config: RedisConfig, form: BlockFormat, clock: Clock) -> None:
        """Connect once, to find mistakes at start. Raises ConfigError if that fails."""
        self._config = config
        self._form = form
        self._clock = clock
        self._address = Address.parse(config.url)
        self._tls = tls_context(config) if self._address.tls else None
        self._prefix = config.key_prefix.encode()
        self._ttl = [b"PX", b"%d" % (config.ttl_s * 1e3)] if config.ttl_s is not None else []
        self._value_bytes = HEADER_BYTES + form.block_bytes
        self._head_bytes = len(b"$%d\r\n" % self._value_bytes) + HEADER_BYTES
        self._counters = StorageCounters("redis", form.block_bytes)
        self._lock = Lock()
        self._idle: list[RespConnection] = []
        self._closed = False
        try:
            self._idle.append(self._connect(self._deadline(config.connect_timeout_s)))
        except StorageTimeout:
            raise  # the server accepts connections but does not answer; it may recover
        except StorageError as error:
            raise ConfigError(f"storage backend 'redis': {error}") from error

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        """Connect and check the server. Raises ConfigError if it cannot work and StorageTimeout
        if it does not answer; logs each limitation."""
        config = read_settings(RedisConfig, settings, "redis")
        storage = cls(config, opening.format, opening.clock)
        try:
            storage._check_server()
        except BaseException:
            storage.close()
            raise
        return storage

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        deadline = self._deadline(timeout_s)
        keys = [key for run in runs for key in run]
        present = self._with_connection(
            lambda link: self._exists(link, keys, deadline), deadline
        )
        return leading(runs, present)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._form.check(into)
        deadline = self._deadline(timeout_s)
        outcomes = self._with_connection(
            lambda link: self._read(link, keys, into, deadline), deadline
        )
        return self._counters.count_reads(outcomes)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        self._form.check(blocks)
        deadline = self._deadline(timeout_s)
        work = list(zip(keys, blocks, parents, strict=True))
        outcomes = self._with_connection(
            lambda link: self._write(link, work, deadline), deadline
        )
        return self._counters.count_writes(outcomes)

    def remove(self, keys: Sequence[BlockKey] | None, *, timeout_s: float) -> int:
        deadline = self._deadline(timeout_s)
        if keys is None:
            return self._with_connection(
                lambda link: self._remove_all(link, deadline), deadline
            )
        gone = self._with_connection(
            lambda link: self._ask(link, b"UNLINK", keys, deadline), deadline
        )
        return gone.count(b":1")

    def stats(self) -> StorageStats:
        return self._counters.stats()

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for link in idle:
            link.close()

    def _check_server(self) -> None:
        deadline = self._deadline(_CHECK_TIMEOUT_S)
        try:
            warnings = self._with_connection(
                lambda link: check_server(
                    link, prefix=self._prefix, has_ttl=bool(self._ttl), deadline=deadline
                ),
                deadline,
            )
        except StorageTimeout:
            raise
        except StorageError as error:
            raise ConfigError(f"storage backend 'redis': {error}") from error
        for warning in warnings:
            log.warning("redis storage %s: %s", self._address, warning)

    def _read(
        self,
        link: RespConnection,
        keys: Sequence[BlockKey],
        into: Sequence[memoryview],
        deadline: Deadline,
    ) -> list[BlockRead]:
        verb, more = (b"GETEX", self._ttl) if self._ttl else (b"GET", [])
        asks = [command(verb, self._name(key), *more) for key in keys]
        window = max(2, _WINDOW_BYTES // self._value_bytes)
        link.send([b"".join(asks[:window])], deadline)
        header = bytearray(HEADER_BYTES)
        outcomes = []
        for place, (key, view) in enumerate(zip(keys, into, strict=True)):
            there = self._receive(link, header, view, deadline)
            if place + window < len(asks):
                # Sent before verifying, so that the server works at the same time.
                link.send([asks[place + window]], deadline)
            outcomes.append(self._verified(key, header, view, there))
        damaged = [k for k, o in zip(keys, outcomes, strict=True) if o is BlockRead.DAMAGED]
        if damaged:
            # A key is never rewritten, so a damaged value must be removed first.
            link.send([command(b"UNLINK", *map(self._name, damaged))], deadline)
            # a replica refuses to write; reading continues
            with contextlib.suppress(ReplyError):
                link.reply(deadline)
        return outcomes

    def _receive(
        self, link: RespConnection, header: bytearray, view: memoryview, deadline: Deadline
    ) -> BlockRead:
        """Receive the reply to one GET. A block that was read is not verified yet."""
        # Read only the header, so that one call receives the payload at its aligned target: a
        # copy in the kernel to an odd address is slower.
        try:
            value_bytes = link.bulk(deadline, ahead=self._head_bytes)
        except ReplyError as error:
            if ": WRONGTYPE " not in str(error):
                raise
            self._counters.count_failure("wrong_type")
            return BlockRead.DAMAGED
        if value_bytes is None:
            return BlockRead.ABSENT
        if value_bytes > _MAX_VALUE_BYTES:
            raise StorageError(
                f"{self._address} announced a value of {value_bytes} bytes, "
                f"more than the limit of {_MAX_VALUE_BYTES}"
            )
        if value_bytes != HEADER_BYTES + len(view):
            _drain(link, value_bytes + 2, deadline)
            self._counters.count_failure("bad_length")
            return BlockRead.DAMAGED
        link.fill([memoryview(header), view, memoryview(bytearray(2))], deadline)
        return BlockRead.READ

    def _verified(
        self, key: BlockKey, header: bytearray, view: memoryview, there: BlockRead
    ) -> BlockRead:
        if there is not BlockRead.READ:
            return there
        try:
            verify_block(header, view, form=self._form, key=key)
        except StorageCorrupt as error:
            self._counters.count_failure(error.reason)
            return BlockRead.DAMAGED
        return BlockRead.READ

    def _write(
        self,
        link: RespConnection,
        work: Sequence[tuple[BlockKey, memoryview, BlockKey]],
        deadline: Deadline,
    ) -> list[BlockWrite]:
        present = self._exists(link, [key for key, _, _ in work], deadline)
        tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in [b"NX", *self._ttl])
        num_words = 4 + len(self._ttl)
        for (key, block, parent), there in zip(work, present, strict=True):
            if there:
                continue
            header = encode_header(self._form, key, parent, block)
            name = self._name(key)
            start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (num_words, len(name), name)
            value = b"$%d\r\n%b" % (len(header) + len(block), header)
            link.send([start + value, block, tail], deadline)
        return [
            BlockWrite.PRESENT if there else self._stored(link, deadline) for there in present
        ]

    def _stored(self, link: RespConnection, deadline: Deadline) -> BlockWrite:
        try:
            reply = link.reply(deadline)
        except ReplyError as error:
            if ": OOM " not in str(error):
                raise
            self._counters.count_failure("no_room")
            return BlockWrite.REFUSED
        if reply not in (b"+OK", b"$-1"):
            raise StorageError(f"{self._address} answered SET with {reply[:40]!r}")
        return BlockWrite.WRITTEN if reply == b"+OK" else BlockWrite.PRESENT

    def _remove_all(self, link: RespConnection, deadline: Deadline) -> int:
        """Remove the blocks of this format with our prefix."""
        removed, cursor = 0, b"0"
        pattern = re.sub(rb"([\\*?\[\]])", rb"\\\1", self._prefix) + b"*"
        start, end = FINGERPRINT_BYTES
        while True:
            words = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            cursor, names = link.scan(words, deadline)
            asks = [
                command(b"GETRANGE", name, b"%d" % start, b"%d" % (end - 1)) for name in names
            ]
            link.send([b"".join(asks)], deadline)
            ours = [name for name in names if _string(link, deadline) == self._form.fingerprint]
            if ours:
                link.send([command(b"UNLINK", *ours)], deadline)
                removed += link.number(deadline)
            if cursor == b"0":
                return removed

    def _exists(
        self, link: RespConnection, keys: Sequence[BlockKey], deadline: Deadline
    ) -> list[bool]:
        replies = self._ask(link, b"EXISTS", keys, deadline)
        for reply in replies:
            if reply not in (b":0", b":1"):
                raise StorageError(f"{self._address} answered EXISTS with {reply[:40]!r}")
        return [reply == b":1" for reply in replies]

    def _ask(
        self, link: RespConnection, verb: bytes, keys: Sequence[BlockKey], deadline: Deadline
    ) -> list[bytes]:
        """One small reply for each key."""
        if not keys:
            return []
        link.send([b"".join(command(verb, self._name(key)) for key in keys)], deadline)
        return [link.reply(deadline) for _ in keys]

    def _name(self, key: BlockKey) -> bytes:
        return self._prefix + key.hex().encode()

    def _with_connection(self, work: Callable[[RespConnection], T], deadline: Deadline) -> T:
        """Run `work` on a connection; once more on a new one if an idle connection was dead."""
        link = self._take_idle()
        if link is not None:
            try:
                return self._finish(link, work)
            except (ReplyError, ConfigError):
                raise  # the server answered: another connection would get the same answer
            except StorageError:
                deadline.left_s()
                self._drop_idle()
        return self._finish(self._connect(deadline), work)

    def _finish(self, link: RespConnection, work: Callable[[RespConnection], T]) -> T:
        try:
            result = work(link)
        except BaseException:
            link.close()
            raise
        with self._lock:
            if not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(link)
                return result
        link.close()
        return result

    def _connect(self, deadline: Deadline) -> RespConnection:
        if self._closed:
            raise StorageError("redis storage is closed")
        return RespConnection(
            self._address, self._tls, self._config.connect_timeout_s, deadline
        )

    def _take_idle(self) -> RespConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _deadline(self, timeout_s: float) -> Deadline:
        return Deadline(self._clock, timeout_s, str(self._address))


def _string(link: RespConnection, deadline: Deadline) -> bytes:
    """A small string; empty if the value has another type and belongs to another program."""
    try:
        return link.value(deadline)
    except ReplyError as error:
        if ": WRONGTYPE " not in str(error):
            raise
        return b""


def _drain(link: RespConnection, num_bytes: int, deadline: Deadline) -> None:
    """Read and drop bytes, so that the next reply can be read."""
    scratch = memoryview(bytearray(min(num_bytes, _DRAIN_BYTES)))
    while num_bytes:
        piece = scratch[: min(num_bytes, len(scratch))]
        link.fill([piece], deadline)
        num_bytes -= len(piece)
