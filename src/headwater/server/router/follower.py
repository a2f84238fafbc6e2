"""Follows one instance's KV events: listens, notices gaps, asks for what is missing.

Belongs to the router's event loop. An instance that says nothing is asked now and then, so a
message that was lost on the way to a quiet listener is noticed too.
"""

import asyncio
import logging
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from headwater.metrics.kv_events import END, decode_batch, pack_sequence, unpack_sequence
from headwater.server.router.instance import Instance
from headwater.server.router.messages import EventsAddress
from headwater.server.router.view import EventBatchResult

log = logging.getLogger(__name__)

_WAIT_S = 2.0
"""Silence after which an instance is asked whether there is something new, and after which an
answer does not come any more."""

_MAX_MESSAGE_BYTES = 1 << 28


class Follower:
    """Keeps the view of one instance true, until it is closed."""

    def __init__(
        self, instance: Instance, context: zmq.asyncio.Context, *, wait_s: float = _WAIT_S
    ) -> None:
        self._instance = instance
        self._context = context
        self._wait_ms = round(wait_s * 1e3)
        self._task: asyncio.Task[None] | None = None
        address = instance.told.kv_events
        if address is not None:
            reachable = _reachable(address, instance.told.url)
            self._task = asyncio.get_running_loop().create_task(self._run(reachable))

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until it has stopped listening."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, address: EventsAddress) -> None:
        with self._context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            heard.setsockopt(zmq.SUBSCRIBE, address.topic.encode())
            heard.connect(address.endpoint)
            await self._catch_up(address)
            while True:
                if not await heard.poll(self._wait_ms):
                    await self._catch_up(address)
                elif self._hear(await heard.recv_multipart()) is EventBatchResult.GAP:
                    self._instance.num_gaps += 1
                    await self._catch_up(address)

    def _hear(self, frames: list[bytes]) -> EventBatchResult:
        """One published message; one that cannot be read is a gap."""
        try:
            _, sequence, payload = frames
            return self._instance.view.hear(unpack_sequence(sequence), decode_batch(payload))
        except (ValueError, msgspec.DecodeError) as exc:
            log.warning("an event of %s cannot be read: %s", self._instance.name, exc)
            return EventBatchResult.GAP

    async def _catch_up(self, address: EventsAddress) -> None:
        """Ask for what is missing; without an answer the view is in doubt."""
        view = self._instance.view
        with self._context.socket(zmq.DEALER) as asked:
            asked.setsockopt(zmq.LINGER, 0)
            asked.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            asked.connect(address.replay_endpoint)
            await asked.send_multipart([b"", pack_sequence(view.next)])
            while await asked.poll(self._wait_ms):
                if self._replayed(await asked.recv_multipart()):
                    view.assure()
                    return
        view.doubt()

    def _replayed(self, frames: list[bytes]) -> bool:
        """One message of a replay; whether it was the last."""
        try:
            _, _, sequence, payload = frames
            if sequence == END:
                return True
            self._instance.view.replay(unpack_sequence(sequence), decode_batch(payload))
        except (ValueError, msgspec.DecodeError) as exc:
            log.warning("a replay of %s cannot be read: %s", self._instance.name, exc)
        return False


def _reachable(address: EventsAddress, url: str) -> EventsAddress:
    """The address with its host replaced where that says no more than "everywhere"."""
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
    )
