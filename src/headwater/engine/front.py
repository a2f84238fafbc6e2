"""AsyncEngine: an `EngineClient` on one event loop, with one engine process behind a socket.

It keeps only a mailbox per request. When the engine process dies, every mailbox and every pending
control call fails at once.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence

import zmq

from headwater.engine import wire
from headwater.engine.child import EngineChild
from headwater.engine.client import ControlCall, EngineInfo, R
from headwater.engine.mailbox import Mailbox, abort_output
from headwater.errors import (
    EngineDead,
    HeadwaterError,
    InvariantError,
    PeerRefused,
    RequestError,
)
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.request import Request

log = logging.getLogger(__name__)


class AsyncEngine:
    """The engine process as an `EngineClient`."""

    def __init__(self, child: EngineChild) -> None:
        """`child` belongs to this object from now on; call `start` before anything else."""
        self._child = child
        self._mailboxes: dict[str, Mailbox] = {}
        self._calls: dict[int, asyncio.Future[wire.Reply]] = {}
        self._numbers = itertools.count()
        self._info: EngineInfo | None = None
        self._dead: str | None = None
        self._num_violations = 0
        self._closing = False
        self._died = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() has not returned"
        return self._info

    @property
    def dead(self) -> str | None:
        return self._dead

    @property
    def num_violations(self) -> int:
        return self._num_violations

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    async def start(self, *, timeout_s: float) -> None:
        """Wait until the engine takes requests.

        Raises what the engine raised, with its own sentence, and leaves nothing behind.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self._child.address)
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._child.watch(self._tell_exit)
        try:
            async with asyncio.timeout(timeout_s):
                self._drain()
                self._info = await self._ready
        except TimeoutError as exc:
            await self.close()
            raise EngineDead(f"the engine was not ready after {timeout_s:.0f} s") from exc
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the engine and wait for it. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._send(wire.Stop())
        await asyncio.to_thread(self._child.close, at_once=self._info is None)
        self._end("the engine was stopped")
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=0)
        self._context.term()

    async def wait_dead(self) -> str:
        """Return why, once the engine is gone."""
        await self._died.wait()
        assert self._dead is not None, "the event is set with its reason"
        return self._dead

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        self._check_alive()
        request_id = request.request_id
        if request_id in self._mailboxes:
            raise RequestError(f"request {request_id} is already running")
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
        self._check_alive()
        number = next(self._numbers)
        future = self._calls[number] = self._loop.create_future()
        try:
            self._send(wire.pack_call(number, call))
            result = wire.unpack_reply(call, await future)
        finally:
            self._calls.pop(number, None)
        if isinstance(result, EngineInfo):
            self._info = result  # other weights are served from now on
        return result

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _send(self, message: wire.ToEngine) -> None:
        if self._dead is not None:
            return
        # The socket has no high-water mark, so a send fails only without a peer: the engine
        # process has just died, and every waiting caller is about to get EngineDead.
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK, copy=False)
        # A send may swallow the wake-up of a message that arrived meanwhile.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read every message that has arrived; the descriptor wakes us once for all of them."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(wire.decode_from_engine(frame))

    def _receive(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs(outputs):
                for entry in outputs:
                    self._deliver(entry)
            case wire.Refusal(request_id, kind, sentence):
                if (mailbox := self._mailboxes.get(request_id)) is not None:
                    mailbox.fail(wire.rebuild_error(kind, sentence))
            case wire.Reply(number):
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result(message)
            case wire.Ready(info):
                if not self._ready.done():
                    self._ready.set_result(info)
            case wire.EngineFailed(kind, sentence):
                self._num_violations += kind == InvariantError.__name__
                self._fail(kind, sentence)

    def _deliver(self, entry: wire.Output) -> None:
        mailbox = self._mailboxes.get(entry.request_id)
        if mailbox is not None:  # the client of a request that was aborted is gone
            mailbox.put(wire.unpack_output(entry))

    def _fail(self, kind: str, sentence: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(wire.rebuild_error(kind, sentence))
        self._end(sentence)

    def _exited(self, code: int) -> None:
        self._drain()  # its last message may say why
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._fail("EngineDead", f"the engine process ended with {how}")

    def _end(self, reason: str) -> None:
        """Fail every mailbox and pending call, once."""
        if self._dead is not None:
            return
        if self._info is not None and not self._closing:
            log.error(
                "engine died; requests get 503 until the server is restarted: pid=%d reason=%s "
                "failed_requests=%d",
                *(self._child.pid, reason, len(self._mailboxes)),
            )
        self._dead = reason
        self._died.set()
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDead(reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    def _tell_exit(self, code: int) -> None:
        """From the watching thread: go on in the event loop, if there still is one."""
        with contextlib.suppress(RuntimeError):  # the loop closed first
            self._loop.call_soon_threadsafe(self._exited, code)
