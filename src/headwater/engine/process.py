"""The engine process: one inbox, one loop, and a connection to the supervisor that started it.

The loop sleeps in C while there is nothing to do. Requests, aborts and control calls of each
HTTP worker arrive in the order in which they were sent, and are handled between two steps. The
outputs of a step are packed once for each worker that has any, so the cost of a step does not
grow with the number of workers.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import zmq

from headwater.clock import SystemClock
from headwater.engine import wire
from headwater.engine.client import Answer, ControlCall, EngineInfo, Pause
from headwater.engine.owners import RequestOwners
from headwater.engine.rundir import remove_socket_folder
from headwater.engine.step_watch import StepWatch
from headwater.engine.watchdog import StepWatchdog
from headwater.errors import (
    EngineDead,
    HeadwaterError,
    InvariantError,
    QueueFull,
    RequestError,
)
from headwater.metrics.stats import EngineStats
from headwater.scheduler.request import Request
from headwater.scheduler.results import StepOutputs
from headwater.transfer.completions import CompletionQueue
from headwater.types import RequestId

log = logging.getLogger(__name__)

_DRAIN_S = 2.0
"""Longest wait for writes to lower tiers before the process ends."""

_SUPERVISOR = 0
"""Standard input: a socket that joins this process with the supervisor."""

_CHUNK_BYTES = 1 << 16


class Core(Protocol):
    """The core that the loop runs; `EngineCore` is the real one."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId) -> None: ...
    def control(self, call: ControlCall[Any], answer: Answer) -> None: ...
    def step(self) -> StepOutputs: ...
    def stats(self) -> EngineStats: ...
    def publish(self) -> None: ...
    def sleep_s(self) -> float | None: ...
    @property
    def completions(self) -> CompletionQueue: ...
    @property
    def device_since(self) -> tuple[float, int] | None: ...
    @property
    def step_tokens(self) -> int:
        """Tokens that the last call of `step` submitted."""
        ...

    @property
    def step_timeout_s(self) -> float: ...
    @property
    def failure(self) -> str | None: ...
    def drain(self, within_s: float) -> None: ...
    def close(self) -> None: ...


Build = Callable[[wire.EngineStart], tuple[Core, EngineInfo]]
"""Builds a core from the start line. Raises HeadwaterError with a sentence for the operator."""


def run_engine(build: Build, address: str) -> int:
    """The main function of an engine process: build the core, report, serve until told to stop,
    and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides when to stop
    line = SupervisorLine(address)
    start = line.read_start()
    line.watch()
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        core, info = build(start)
        if start.is_paused:
            core.control(Pause(), lambda result, refusal: None)
        socket.set_hwm(0)
        socket.bind(address)
        loop = EngineLoop(
            core,
            socket,
            StepWatch(SystemClock()),
            line,
            max_live=info.max_num_seqs + start.max_queued,
        )
        watchdog = StepWatchdog(core, core.step_timeout_s, loop.die, SystemClock())
        watchdog.start()
        line.send(wire.Ready(info))
        loop.run()
        watchdog.stop()
        core.drain(_DRAIN_S)
        core.close()
        return 0
    except HeadwaterError as exc:
        line.send(wire.EngineFailed(type(exc).__name__, str(exc)))
        return 1
    except Exception as exc:
        log.exception("the engine died")
        sentence = f"the engine died: {type(exc).__name__}: {exc}"
        kind = InvariantError if isinstance(exc, InvariantError) else EngineDead
        line.send(wire.EngineFailed(kind.__name__, sentence))
        return 1
    finally:
        socket.close(linger=0)
        context.term()


class SupervisorLine:
    """The socket to the supervisor: orders come in, reports go out.

    The supervisor waits for this process before it closes the socket. So a closed socket shows
    that the supervisor died, and this process ends at once, whatever it is doing.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._buffer = b""
        self._orders: SimpleQueue[wire.Order] = SimpleQueue()
        self._writing = threading.Lock()
        self._wake: Callable[[], None] | None = None

    def read_start(self) -> wire.EngineStart:
        """Read the first line, which has the settings of the engine."""
        return wire.decode_start(self._read_line())

    def watch(self) -> None:
        """Start a thread that reads orders."""
        threading.Thread(target=self._watch, name="supervisor", daemon=True).start()

    def on_order(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the reading thread for each order; it wakes the loop."""
        self._wake = wake
        wake()  # for orders that came earlier

    def take_orders(self) -> list[wire.Order]:
        """The orders since the last call."""
        orders = []
        while not self._orders.empty():
            orders.append(self._orders.get_nowait())
        return orders

    def send(self, report: wire.Report) -> None:
        """Send a report to the supervisor. Any thread may call it."""
        data = wire.encode_line(report)
        with self._writing:
            while data:
                data = data[os.write(_SUPERVISOR, data) :]

    def _watch(self) -> None:
        while line := self._read_line():
            order = wire.decode_order(line)
            if isinstance(order, wire.Ping):
                self.send(wire.Pong())
                continue
            self._orders.put(order)
            if self._wake is not None:
                self._wake()
        remove_socket_folder(self._address)
        os._exit(1)

    def _read_line(self) -> bytes:
        """The next line; empty at the end of the socket."""
        while b"\n" not in self._buffer:
            try:
                chunk = os.read(_SUPERVISOR, _CHUNK_BYTES)
            except ConnectionError:
                chunk = b""
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class EngineLoop:
    """Handles messages of all workers, runs the core, and sends its outputs."""

    def __init__(
        self,
        core: Core,
        socket: "zmq.Socket[bytes]",
        watch: StepWatch,
        line: SupervisorLine,
        *,
        max_live: int,
    ) -> None:
        """Refuses sequences above `max_live` with QueueFull."""
        self._core = core
        self._watch = watch
        self._socket = socket
        self._line = line
        self._max_live = max_live
        self._stopped = False
        self._owners = RequestOwners()
        self._known: set[bytes] = set()
        """Workers that have sent a message and are not gone."""
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(core.completions.fileno(), zmq.POLLIN)
        line.on_order(core.completions.wake)

    def run(self) -> None:
        """Run until a `Stop` arrives."""
        while not self._stopped:
            if not self._core.has_work:
                self._sleep()
            self._take_inbox()
            if self._core.has_work:
                self._step()
            self._core.publish()

    def die(self, sentence: str) -> None:
        """Called from the watchdog's thread while the loop is stuck in a step: report why, and
        end the process without waiting for any thread."""
        if self._core.device_since is None:  # the step has ended after all
            return
        self._line.send(wire.EngineFailed(EngineDead.__name__, sentence))
        os._exit(1)

    def _step(self) -> None:
        began_s = self._watch.now()
        outputs = self._core.step()
        self._report(outputs)
        self._watch.note_step(began_s, self._core.step_tokens)
        if self._watch.wants_tiers:
            self._watch.note_host(self._core.stats().tiers["host"])

    def _sleep(self) -> None:
        """Sleep in C until a message or a finished copy arrives, or a deadline comes."""
        sleep_s = self._core.sleep_s()
        # One millisecond longer, so that the deadline has passed when this returns.
        self._poller.poll(None if sleep_s is None else int(sleep_s * 1e3) + 1)
        self._core.completions.clear()

    def _take_inbox(self) -> None:
        for order in self._line.take_orders():
            self._obey(order)
        while True:
            try:
                worker, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._known.add(worker)
            self._receive(worker, wire.decode_to_engine(frame))

    def _obey(self, order: wire.Order) -> None:
        match order:
            case wire.Stop():
                self._stopped = True
            case wire.WorkerGone(name):
                worker = name.encode()
                self._known.discard(worker)
                for request_id in self._owners.remove_worker(worker):
                    self._core.abort(RequestId(request_id))

    def _receive(self, worker: bytes, message: wire.ToEngine) -> None:
        match message:
            case wire.Add(request_id):
                try:
                    self._add(worker, message)
                except RequestError as exc:
                    refusal = wire.Refusal(request_id, type(exc).__name__, str(exc))
                    self._send(worker, refusal)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self._owners.remove(request_id)
                    self._core.abort(RequestId(request_id))
            case wire.PackedCall(number):
                self._core.control(
                    wire.unpack_call(message), partial(self._answer, worker, number)
                )

    def _add(self, worker: bytes, message: wire.Add) -> None:
        if len(self._owners) >= self._max_live:
            raise QueueFull(
                f"{len(self._owners)} sequences are running or waiting, the limit is "
                f"{self._max_live}; retry later"
            )
        self._core.add(wire.unpack_request(message))
        self._owners.add(message.request_id, worker)

    def _answer(
        self,
        worker: bytes,
        number: int,
        result: Any,  # noqa: ANN401 -- by call
        refusal: RequestError | None,
    ) -> None:
        if isinstance(result, EngineInfo):
            # Published before the answer, so that the caller finds every worker up to date.
            self._line.send(wire.Ready(result))
            for other in self._known:
                self._send(other, wire.InfoChanged(result))
        self._send(worker, wire.pack_reply(number, result, refusal))

    def _report(self, outputs: StepOutputs) -> None:
        """Send each worker its part of a step in one message."""
        for worker, frame in self._owners.pack(outputs):
            self._send_frame(worker, frame)

    def _send(self, worker: bytes, message: wire.FromEngine) -> None:
        self._send_frame(worker, wire.encode(message))

    def _send_frame(self, worker: bytes, frame: bytes) -> None:
        # A message to a worker that has ended is dropped; the supervisor reports its end.
        self._socket.send(worker, zmq.SNDMORE)
        self._socket.send(frame, copy=False)
