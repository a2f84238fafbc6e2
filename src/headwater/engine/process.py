"""The engine process: one inbox, one loop, and a watch on the process that started it.

Blocks in C while there is nothing to do. Requests, aborts and control arrive in the order
they were sent and are taken between two steps.
"""

import io
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq

from headwater.clock import SystemClock
from headwater.engine import wire
from headwater.engine.client import Answer, ControlCall, EngineInfo
from headwater.engine.rundir import remove_socket_folder
from headwater.engine.step_watch import StepWatch
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import EngineDead, HeadwaterError, InvariantError, RequestError
from headwater.metrics.stats import EngineStats
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.request import Request
from headwater.transfer.completions import CompletionQueue
from headwater.types import RequestId

log = logging.getLogger(__name__)

_DRAIN_S = 2.0
"""Longest wait for writes to lower tiers before the process ends."""

_LAST_WORDS_S = 2.0
"""Longest wait for the last message of an engine whose device hangs."""


class Core(Protocol):
    """What the loop turns; `EngineCore` is the real one."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def control(self, call: ControlCall[Any], answer: Answer) -> None: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...
    def publish(self) -> None: ...
    def sleep_s(self) -> float | None: ...
    @property
    def completions(self) -> CompletionQueue: ...
    @property
    def device_since(self) -> tuple[float, int] | None: ...
    @property
    def step_timeout_s(self) -> float: ...
    @property
    def failure(self) -> str | None: ...
    def drain(self, within_s: float) -> None: ...
    def close(self) -> None: ...


Build = Callable[[bytes], tuple[Core, EngineInfo]]
"""Makes a core from the settings line. Raises HeadwaterError with a sentence for the operator."""


def run_engine(build: Build, address: str) -> int:
    """Live as an engine process: build, report, serve until told to stop; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server decides when to stop, after draining
    pipe = io.FileIO(0, closefd=False)  # unbuffered: a buffer's lock would outlive its thread
    settings = pipe.readline()
    threading.Thread(target=_watch_parent, args=(pipe, address), daemon=True).start()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    try:
        core, info = build(settings)
        socket.send(wire.encode(wire.Ready(info)))
        loop = EngineLoop(core, socket, StepWatch(SystemClock()))
        watchdog = StepWatchdog(core, core.step_timeout_s, loop.die, SystemClock())
        watchdog.start()
        loop.run()
        watchdog.stop()
        core.drain(_DRAIN_S)
        core.close()
        return 0
    except HeadwaterError as exc:
        socket.send(wire.encode(wire.EngineFailed(type(exc).__name__, str(exc))))
        return 1
    except Exception as exc:
        log.exception("the engine died")
        sentence = f"the engine died: {type(exc).__name__}: {exc}"
        kind = InvariantError if isinstance(exc, InvariantError) else EngineDead
        socket.send(wire.encode(wire.EngineFailed(kind.__name__, sentence)))
        return 1
    finally:
        socket.close(linger=1000)
        context.term()


class EngineLoop:
    """Takes messages, turns the core, sends what came out."""

    def __init__(self, core: Core, socket: "zmq.Socket[bytes]", watch: StepWatch) -> None:
        self._core = core
        self._watch = watch
        self._socket = socket
        self._context = socket.context
        self._stopped = False
        self._speaking = threading.Lock()
        """Held while the socket is used: by the loop, or for good by `die`."""
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(core.completions.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Until a `Stop` arrives."""
        while not self._stopped:
            if not self._core.has_work:
                self._sleep()
            self._take_inbox()
            if self._core.has_work:
                self._step()
            self._core.publish()

    def die(self, sentence: str) -> None:
        """From the watchdog's thread, while the loop is stuck in a step: tell every client, and
        end the process without waiting for any thread."""
        self._speaking.acquire()
        if self._core.device_since is None:  # the step has just ended after all
            self._speaking.release()
            return
        self._socket.send(wire.encode(wire.EngineFailed(EngineDead.__name__, sentence)))
        self._socket.close(linger=1000)
        threading.Timer(_LAST_WORDS_S, os._exit, args=(1,)).start()
        self._context.term()  # returns when the message is on its way
        os._exit(1)

    def _step(self) -> None:
        began_s = self._watch.now()
        outputs = self._core.step()
        self._report(outputs)
        self._watch.note_step(began_s, len(outputs))
        if self._watch.wants_tiers:
            self._watch.note_host(self._core.stats().tiers["host"])

    def _sleep(self) -> None:
        """In C, until a message or a finished copy arrives, or a deadline comes."""
        sleep_s = self._core.sleep_s()
        # A millisecond more, so that the deadline has passed when this returns.
        self._poller.poll(None if sleep_s is None else int(sleep_s * 1e3) + 1)
        self._core.completions.clear()

    def _take_inbox(self) -> None:
        while True:
            try:
                with self._speaking:
                    frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(wire.decode_to_engine(frame))

    def _receive(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Add(request_id):
                try:
                    self._core.add(wire.unpack_request(message))
                except RequestError as exc:
                    self._send(wire.Refusal(request_id, type(exc).__name__, str(exc)))
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self._core.abort(RequestId(request_id))
            case wire.PackedCall(number):
                self._core.control(wire.unpack_call(message), partial(self._answer, number))
            case wire.Stop():
                self._stopped = True

    def _answer(self, number: int, result: Any, refusal: RequestError | None) -> None:  # noqa: ANN401 -- by call
        self._send(wire.pack_reply(number, result, refusal))

    def _report(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self._send(wire.Outputs([wire.pack_output(output) for output in outputs]))

    def _send(self, message: wire.FromEngine) -> None:
        frame = wire.encode(message)
        with self._speaking:
            self._socket.send(frame, copy=False)


def _watch_parent(pipe: io.FileIO, address: str) -> None:
    """Block until the server's end of the pipe closes, then leave at once.

    A server that stops in order waits for this process before it lets the pipe go, so an end
    of the pipe means that it died or has given up waiting.
    """
    pipe.read()
    remove_socket_folder(address)
    os._exit(1)
