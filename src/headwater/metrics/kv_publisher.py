"""Publishes KV events: a PUB socket for new events, a ROUTER socket for missed ones.

    the loop ── publish(changes) ──▶ queue ──▶ thread ──▶ PUB      to all subscribers
    the loop ◀── snapshot_wanted ────────── thread ◀──▶ ROUTER   (empty, start) ▶ (…, batches, end)

The loop only puts changes into a queue; the thread encodes them and owns the sockets. A request
for events that are older than the buffer or than this engine is answered with one batch:
`AllBlocksCleared`, then everything that is stored. It has the number of the last batch that it
includes.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue

import zmq

from headwater.clock import Clock
from headwater.config import KvEventsConfig
from headwater.errors import ConfigError
from headwater.events import BlocksCleared, BlocksStored, CacheEvent
from headwater.metrics.kv_curve import CurveKeys
from headwater.metrics.kv_events import (
    END,
    encode_batch,
    encode_snapshot,
    pack_sequence,
    unpack_sequence,
)

_MAX_ASKERS = 64
_MAX_REQUEST_BYTES = 4096
"""Longest message to the replay socket; a CURVE handshake has messages of about 400 bytes."""
_LONG_BATCH = 64
"""Changes in a batch, or blocks in a change, above which encoding pauses."""


class KvPublisher:
    """Publishes the KV events of one engine. The loop calls `publish`, and `publish_snapshot`
    when `snapshot_wanted` is set; they never wait."""

    def __init__(
        self,
        config: KvEventsConfig,
        *,
        block_tokens: int,
        clock: Clock,
        started_s: float,
        wake: Callable[[], object],
        max_queued: int = 4096,
        keys: CurveKeys | None = None,
    ) -> None:
        """Binds the sockets, or raises ConfigError. `started_s` is the current time since 1970.
        `wake` makes the loop read `snapshot_wanted`; any thread may call it.

        When `max_queued` batches wait for the thread, later batches are dropped until it has
        sent the waiting ones; then one snapshot replaces the dropped ones. With `keys`, only
        processes with the peer token can connect.
        """
        self._config = config
        self._block_tokens = block_tokens
        self._clock = clock
        self._epoch_s = started_s - clock.now()
        self._wake = wake
        self._max_queued = max_queued
        self._topic = config.topic.encode()
        self._queue: SimpleQueue[tuple[bool, Sequence[CacheEvent]]] = SimpleQueue()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._overrun = False
        self._closed = False
        self.snapshot_wanted = False
        """Whether the loop should call `publish_snapshot` next."""
        self._context = zmq.Context()
        self._keys = keys
        self._authenticator = None if keys is None else keys.authenticator(self._context)
        self._open_sockets()
        self._next = 0
        self._buffer: deque[tuple[int, bytes | memoryview]] = deque(maxlen=config.buffer_steps)
        self._askers: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._send_batch([BlocksCleared()])
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The address of the PUB socket."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str:
        """The address of the ROUTER socket."""
        return self._replay_endpoint

    def publish(self, changes: Sequence[CacheEvent]) -> None:
        """Queue `changes` for subscribers. While the queue is full, they are dropped. When the
        thread has emptied the queue, it asks for a snapshot, so at most one snapshot is
        queued."""
        if self._overrun or not changes:
            return
        if self._queue.qsize() >= self._max_queued:
            self._overrun = True
            os.eventfd_write(self._signal, 1)
            return
        self._put(False, changes)

    def publish_snapshot(self, changes: Sequence[CacheEvent]) -> None:
        """Queue everything that is cached now. The caller has passed all earlier changes to
        `publish`."""
        self.snapshot_wanted = False
        if self._overrun:
            self._overrun = False
            self._put(False, [BlocksCleared(), *changes])
        self._put(True, changes)

    def close(self) -> None:
        """Send everything that is queued and end the thread. Calling it twice is safe."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._signal, 1)
            self._thread.join()
            os.close(self._signal)
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=200)

    def _put(self, is_snapshot: bool, changes: Sequence[CacheEvent]) -> None:
        self._queue.put((is_snapshot, changes))
        os.eventfd_write(self._signal, 1)

    def _open_sockets(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(self._config.hwm)
        self._endpoint = self._bind(self._pub, self._config.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        # A whole replay fits. If a client does not read, sending fails instead of waiting.
        self._router.set_hwm(self._config.buffer_steps + 2)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        self._replay_endpoint = self._bind(self._router, self._config.replay_endpoint)

    def _bind(self, socket: "zmq.Socket[bytes]", endpoint: str) -> str:
        if self._keys is not None:
            self._keys.serve(socket)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as exc:
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--kv-events-config: cannot bind {endpoint}: {exc}; choose another endpoint"
            ) from exc
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._signal, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll())
            if self._signal in ready:
                os.eventfd_read(self._signal)
                self._work_off()
            if self._router in ready:
                self._answer(self._router.recv_multipart())

    def _work_off(self) -> None:
        """Send everything that is queued."""
        while True:
            try:
                is_snapshot, changes = self._queue.get_nowait()
            except Empty:
                break
            if is_snapshot:
                self._answer_askers(changes)
            else:
                self._send_batch(changes)
        if self._overrun:
            self.snapshot_wanted = True
            self._wake()

    def _send_batch(self, changes: Sequence[CacheEvent]) -> None:
        payload = self._payload(changes)
        self._buffer.append((self._next, payload))
        self._pub.send_multipart([self._topic, pack_sequence(self._next), payload], copy=False)
        self._next += 1

    def _payload(self, changes: Sequence[CacheEvent]) -> bytes | memoryview:
        now = self._epoch_s + self._clock.now()
        # token ids are prompts, and hashes are enough for routers
        if not self._config.token_ids:
            changes = [
                replace(change, tokens=b"") if isinstance(change, BlocksStored) else change
                for change in changes
            ]
        is_long = len(changes) > _LONG_BATCH or any(
            isinstance(change, BlocksStored) and len(change.keys) > _LONG_BATCH
            for change in changes
        )
        encode = encode_snapshot if is_long else encode_batch
        return encode(now, changes, self._block_tokens)

    def _answer(self, frames: list[bytes]) -> None:
        """Answer a replay request. Other messages are ignored."""
        try:
            who, empty, start_frame = frames
            start = unpack_sequence(start_frame)
        except ValueError:
            return
        if empty:
            return
        if self._buffer[0][0] <= start <= self._next:
            self._reply(who, [entry for entry in self._buffer if entry[0] >= start])
        elif len(self._askers) < _MAX_ASKERS:
            self._askers.append(who)
            self.snapshot_wanted = True
            self._wake()

    def _answer_askers(self, changes: Sequence[CacheEvent]) -> None:
        askers, self._askers = self._askers, []
        if askers:
            payload = self._payload([BlocksCleared(), *changes])
            for who in askers:
                self._reply(who, [(self._next - 1, payload)])

    def _reply(self, who: bytes, batches: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Send batches and the end. A client that has left or does not read misses some."""
        frames = [(pack_sequence(number), payload) for number, payload in batches]
        try:
            for number, payload in [*frames, (END, b"")]:
                self._router.send_multipart(
                    [who, b"", self._topic, number, payload], zmq.NOBLOCK, copy=False
                )
        except zmq.ZMQError:
            return
