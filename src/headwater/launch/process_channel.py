"""The connection between the supervisor and one HTTP worker: calls and events in both directions.

Frames are msgpack with their length before them. Messages of one side begin to be handled in the
order in which they were sent. Calls run concurrently, so a call that waits delays no other.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Any

import msgspec

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 28


class _Kind(IntEnum):
    EVENT = 0
    CALL = 1
    REPLY = 2
    ERROR = 3


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    kind: _Kind
    number: int
    """Number of the call; 0 for an event."""

    name: str
    values: list[Any]


CallHandler = Callable[..., Awaitable[Any]]
"""Gets the arguments of a call and returns its result, which msgpack must be able to encode."""

EventHandler = Callable[..., None]

_decode = msgspec.msgpack.Decoder(_Frame).decode
_encode = msgspec.msgpack.Encoder().encode


class ProcessGone(ConnectionError):
    """The other process is gone."""


class ProcessChannel:
    """One end of the connection. Used on one event loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        calls: Mapping[str, CallHandler],
        events: Mapping[str, EventHandler],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._calls = calls
        self._events = events
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def run(self) -> None:
        """Handle messages of the other side until it is gone."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes is too long")
                frame = _decode(await self._reader.readexactly(length))
                self._receive(frame)
                if frame.kind is _Kind.CALL:
                    await asyncio.sleep(0)  # the call begins before later messages are handled
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._close()

    async def call(self, name: str, *values: Any) -> Any:  # noqa: ANN401 -- by call
        """The reply to a call. Raises ProcessGone when the other side is gone."""
        if self._is_closed:
            raise ProcessGone(name)
        number = next(self._numbers)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_Frame(_Kind.CALL, number, name, list(values)))
            return await reply
        finally:
            self._waiting.pop(number, None)

    def tell(self, name: str, *values: Any) -> None:  # noqa: ANN401 -- by event
        """Send an event. It is lost if the other side is gone."""
        if not self._is_closed:
            self._send(_Frame(_Kind.EVENT, 0, name, list(values)))

    def _send(self, frame: _Frame) -> None:
        data = _encode(frame)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES) + data)

    def _receive(self, frame: _Frame) -> None:
        match frame.kind:
            case _Kind.EVENT:
                self._events[frame.name](*frame.values)
            case _Kind.CALL:
                task = asyncio.create_task(self._answer(frame))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            case _Kind.REPLY | _Kind.ERROR:
                future = self._waiting.get(frame.number)
                if future is None or future.done():
                    return
                if frame.kind is _Kind.REPLY:
                    future.set_result(frame.values[0])
                else:
                    future.set_exception(RuntimeError(f"{frame.name}: {frame.values[0]}"))

    async def _answer(self, call: _Frame) -> None:
        try:
            result = await self._calls[call.name](*call.values)
        except Exception as exc:
            log.exception("call failed: name=%s", call.name)
            text = f"{type(exc).__name__}: {exc}"
            self._send(_Frame(_Kind.ERROR, call.number, call.name, [text]))
        else:
            self._send(_Frame(_Kind.REPLY, call.number, call.name, [result]))

    def _close(self) -> None:
        self._is_closed = True
        for task in self._running:
            task.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessGone("the other process is gone"))
        self._writer.close()
