"""Follows the KV events of one instance: subscribes, detects gaps, requests replays.

Runs on the router's event loop. After a time without events it requests a replay, so that a
lost last message is noticed too.
"""

import asyncio
import logging
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from headwater.metrics.kv_curve import CurveKeys
from headwater.metrics.kv_events import END, decode_batch, pack_sequence, unpack_sequence
from headwater.server.router.cache_view import EventBatchResult
from headwater.server.router.instance import Instance
from headwater.server.router.protocol import EventsAddress

log = logging.getLogger(__name__)

_WAIT_S = 2.0
"""Time without events after which a replay is requested, and timeout of a replay."""

_MAX_MESSAGE_BYTES = 1 << 28


class KvEventFollower:
    """Keeps the cache view of one instance up to date until it is closed."""

    def __init__(
        self,
        instance: Instance,
        context: zmq.asyncio.Context,
        *,
        keys: CurveKeys | None = None,
        wait_s: float = _WAIT_S,
    ) -> None:
        """`keys` are those of the cluster; an instance reports whether it needs them."""
        self._instance = instance
        self._context = context
        self._keys = keys
        self._wait_ms = round(wait_s * 1e3)
        self._task: asyncio.Task[None] | None = None
        address = instance.registration.kv_events
        if address is not None:
            reachable = _reachable(address, instance.registration.url)
            self._task = asyncio.get_running_loop().create_task(self._run(reachable))

    def close(self) -> None:
        """Stop following. Calling it twice is safe."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has stopped."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, address: EventsAddress) -> None:
        with self._context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            subscriber.setsockopt(zmq.SUBSCRIBE, address.topic.encode())
            self._secure(subscriber, address)
            subscriber.connect(address.endpoint)
            await self._catch_up(address)
            while True:
                if not await subscriber.poll(self._wait_ms):
                    await self._catch_up(address)
                elif self._apply(await subscriber.recv_multipart()) is EventBatchResult.GAP:
                    self._instance.num_gaps += 1
                    await self._catch_up(address)

    def _secure(self, socket: "zmq.asyncio.Socket", address: EventsAddress) -> None:
        if address.curve and self._keys is not None:
            self._keys.connect(socket)

    def _apply(self, frames: list[bytes]) -> EventBatchResult:
        """Apply one published message; a malformed one counts as a gap."""
        try:
            _, sequence, payload = frames
            return self._instance.view.apply(unpack_sequence(sequence), decode_batch(payload))
        except (ValueError, msgspec.DecodeError) as exc:
            log.warning("malformed KV event: instance=%s error=%s", self._instance.name, exc)
            return EventBatchResult.GAP

    async def _catch_up(self, address: EventsAddress) -> None:
        """Request the missing batches; without an answer the view is degraded."""
        view = self._instance.view
        with self._context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            self._secure(replay, address)
            replay.connect(address.replay_endpoint)
            await replay.send_multipart([b"", pack_sequence(view.next)])
            while await replay.poll(self._wait_ms):
                if self._replayed(await replay.recv_multipart()):
                    view.confirm()
                    return
        view.degrade()

    def _replayed(self, frames: list[bytes]) -> bool:
        """Apply one message of a replay; return whether it was the last one."""
        try:
            _, _, sequence, payload = frames
            if sequence == END:
                return True
            self._instance.view.apply_replayed(unpack_sequence(sequence), decode_batch(payload))
        except (ValueError, msgspec.DecodeError) as exc:
            log.warning(
                "malformed KV event replay: instance=%s error=%s", self._instance.name, exc
            )
        return False


def _reachable(address: EventsAddress, url: str) -> EventsAddress:
    """The address with a wildcard host replaced by the host of the instance's URL."""
    host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host

    def fixed(endpoint: str) -> str:
        for everywhere in ("tcp://0.0.0.0:", "tcp://*:", "tcp://[::]:"):
            if endpoint.startswith(everywhere):
                return f"tcp://{host}:{endpoint.removeprefix(everywhere)}"
        return endpoint

    return EventsAddress(
        endpoint=fixed(address.endpoint),
        replay_endpoint=fixed(address.replay_endpoint),
        topic=address.topic,
        curve=address.curve,
    )
