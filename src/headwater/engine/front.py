"""AsyncEngine: an `EngineClient` on one event loop, connected to an engine process by a socket.

It keeps only a mailbox per request. The supervisor reports when an engine is ready and when it
has ended. When it has ended, every mailbox and every pending control call fails at once. The
next engine has a new connection.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence

import zmq

from headwater.engine import wire
from headwater.engine.client import ControlCall, EngineInfo, R
from headwater.errors import (
    EngineDead,
    EngineRestarting,
    HeadwaterError,
    PeerRefused,
    RequestError,
)
from headwater.scheduler.request import Request, SequenceOutput
from headwater.types import RequestId


class Mailbox:
    """Outputs of one request that its reader has not taken yet, in order. Used in one event loop.

    A slow reader gets the outputs of several steps joined into one, so a slow client costs only
    the memory of its tokens.
    """

    def __init__(self) -> None:
        self._waiting: list[SequenceOutput] = []
        self._error: HeadwaterError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        """Add an output."""
        self._waiting.append(output)
        self._arrived.set()

    def fail(self, error: HeadwaterError) -> None:
        """End the outputs: the reader gets `error` after the outputs that are already here."""
        self._error = error
        self._arrived.set()

    async def take(self) -> SequenceOutput:
        """Wait for at least one output, and return all of them joined into one."""
        await self._arrived.wait()
        if self._waiting:
            joined = _join(self._waiting)
            self._waiting = []
            if self._error is None:
                self._arrived.clear()
            return joined
        assert self._error is not None, "woken with nothing to read"
        raise self._error


class AsyncEngine:
    """The engine process as an `EngineClient`."""

    def __init__(self, name: str) -> None:
        """`name` is unique among the clients of an engine. Call `attach` first."""
        self._name = name
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._numbers = itertools.count()
        self._info: EngineInfo | None = None
        self._dead: str | None = None
        self._retry_after_s: float | None = None
        self.num_violations = 0
        self.num_restarts = 0
        """Engines started after the first one, as reported by the supervisor."""

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "attach() was not called"
        return self._info

    @property
    def dead(self) -> str | None:
        return self._dead

    def attach(self, address: str, info: EngineInfo) -> None:
        """Connect to an engine that accepts requests."""
        self._disconnect()
        self._loop = asyncio.get_running_loop()
        self._info, self._dead, self._retry_after_s = info, None, None
        self._context = self._context or zmq.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.connect(address)
        self._loop.add_reader(socket.fileno(), self._drain)

    def lose(self, reason: str, *, retry_after_s: float | None = None) -> None:
        """The engine has ended: fail every mailbox and pending call. With `retry_after_s` a new
        engine is being started, and is expected after that time."""
        self._disconnect()
        self._dead, self._retry_after_s = reason, retry_after_s
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDead(reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    async def close(self) -> None:
        """Fail all running requests and disconnect. Calling it twice is safe."""
        context, self._context = self._context, None
        if context is not None:
            self.lose("the engine was stopped")
            context.term()

    def check_alive(self) -> None:
        """Raise EngineRestarting or EngineDead while no engine takes requests."""
        if self._dead is None:
            return
        if self._retry_after_s is not None:
            raise EngineRestarting(self._dead, retry_after_s=self._retry_after_s)
        raise EngineDead(self._dead)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        self.check_alive()
        request_id = request.request_id
        if request_id in self._mailboxes:
            raise RequestError(
                f"a request with the id {request_id!r} is already running; use another id"
            )
        mailbox = self._mailboxes[request_id] = Mailbox()
        has_ended = False
        try:
            self._send(wire.pack_request(request))
            while not has_ended:
                output = await mailbox.take()
                has_ended = output.finish_reason is not None
                if output.finish_reason == "refused":
                    raise PeerRefused(output.detail)
                if output.finish_reason == "failed":
                    raise RequestError(output.detail)
                yield output
        except HeadwaterError:
            has_ended = True
            raise
        finally:
            # `abort` has removed the mailbox and sent the abort already.
            if self._mailboxes.pop(request_id, None) is not None and not has_ended:
                self._send(wire.Abort([request_id]))

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        wanted = list(self._mailboxes) if request_ids is None else request_ids
        alive = [name for name in wanted if name in self._mailboxes]
        if alive:
            self._send(wire.Abort(alive))
        for name in alive:
            self._mailboxes.pop(name).put(abort_output(name))
        return len(alive)

    async def control(self, call: ControlCall[R]) -> R:
        self.check_alive()
        number = next(self._numbers)
        future = self._calls[number] = self._loop.create_future()
        try:
            self._send(wire.pack_call(number, call))
            return wire.unpack_reply(call, await future)
        finally:
            self._calls.pop(number, None)

    def _send(self, message: wire.ToEngine) -> None:
        if self._socket is None:
            return
        # The socket has no high-water mark, so a send fails only without a peer: the engine
        # process has just died, and every waiting caller is about to get EngineDead.
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK, copy=False)
        # A send may consume the wake-up of a message that arrived meanwhile.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read every message that has arrived. The descriptor becomes readable once for all of
        them."""
        while (socket := self._socket) is not None:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(wire.decode_from_engine(frame))

    def _receive(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                for output in wire.unpack_outputs(message):
                    self._deliver(output)
            case wire.Refusal(request_id, kind, sentence):
                if (mailbox := self._mailboxes.get(request_id)) is not None:
                    mailbox.fail(wire.rebuild_error(kind, sentence))
            case wire.Reply(number):
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result(message)
            case wire.InfoChanged(info):
                self._info = info

    def _deliver(self, output: SequenceOutput) -> None:
        mailbox = self._mailboxes.get(output.request_id)
        if mailbox is not None:  # None for a request that was aborted
            mailbox.put(output)

    def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self._loop.remove_reader(socket.fileno())
            socket.close(linger=0)


def abort_output(request_id: str) -> SequenceOutput:
    """The last output of a request that was aborted."""
    return SequenceOutput(RequestId(request_id), tokens=[], logprobs=[], finish_reason="abort")


async def aborted_outputs(request: Request) -> AsyncGenerator[SequenceOutput, None]:
    """The outputs of a request that was aborted before the engine had it."""
    yield abort_output(request.request_id)


def _join(outputs: list[SequenceOutput]) -> SequenceOutput:
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return SequenceOutput(
        request_id=first.request_id,
        tokens=[token for output in outputs for token in output.tokens],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        usage=first.usage,
        prompt_logprobs=first.prompt_logprobs,
        detail=last.detail,
    )
