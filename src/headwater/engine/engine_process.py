"""EngineProcess: one life of the engine from the supervisor's side: start, reports, end."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.engine import wire
from headwater.engine.child import ENGINE_ENVIRONMENT, ChildProcess, describe_exit
from headwater.engine.client import EngineInfo
from headwater.errors import EngineDead, InvariantError

_STOP_TIMEOUT_S = 10.0

_MAX_LINE_BYTES = 1 << 20


class EngineProcess:
    """Owns one engine process. Used on one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        start: wire.EngineStart,
        address: str,
        *,
        on_info: Callable[[EngineInfo], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Run `python -m <command> ADDRESS`. `on_info` is called when the engine serves other
        weights."""
        self.address = address
        self._start = start
        self._on_info = on_info
        self._child = ChildProcess(
            [*command, address], environment=ENGINE_ENVIRONMENT, pass_fds=pass_fds
        )
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._failure: wire.EngineFailed | None = None
        self._pong = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has become ready for requests."""
        return self._info.done()

    @property
    def has_broken_invariant(self) -> bool:
        """Whether it ended because an invariant was violated."""
        return self._failure is not None and self._failure.kind == InvariantError.__name__

    async def start(self, *, timeout_s: float) -> EngineInfo:
        """Wait until it accepts requests. Raises the error that the engine raised; then the
        process has ended."""
        reader, self._writer = await asyncio.open_connection(
            sock=self._child.socket, limit=_MAX_LINE_BYTES
        )
        self._reading = asyncio.create_task(self._read(reader))
        self._send(self._start)
        ended = asyncio.create_task(self._child.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {self._info, ended}
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._info.done():
                return self._info.result()
            await self._reading
            if self._failure is not None:
                raise wire.rebuild_error(self._failure.kind, self._failure.sentence)
            raise EngineDead(f"the engine process ended with {describe_exit(ended.result())}")
        except TimeoutError as exc:
            raise EngineDead(f"the engine was not ready after {timeout_s:.0f} s") from exc
        finally:
            ended.cancel()
            if not self._info.done():
                await self.kill()

    async def wait(self) -> str:
        """Wait until the process ends, and return the reason."""
        code = await self._child.wait()
        if self._reading is not None:
            await self._reading  # its last message may contain the reason
        self._close()
        await self._child.end_group()
        if self._failure is not None:
            return self._failure.sentence
        return f"the engine process ended with {describe_exit(code)}"

    async def is_running(self, within_s: float) -> bool:
        """Whether the process answers. It answers during a long step too, but not when it is
        stopped."""
        self._pong.clear()
        self._send(wire.Ping())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._pong.wait()
        return self._pong.is_set()

    def tell_gone(self, worker: str) -> None:
        """Abort the requests of a worker that has ended."""
        self._send(wire.WorkerGone(worker))

    async def stop(self) -> int:
        """Ask it to end, kill it after some seconds, and return its exit code."""
        self._send(wire.Stop())
        code = await self._child.end(_STOP_TIMEOUT_S)
        self._close()
        return code

    async def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._child.kill()
        await self._child.wait()
        self._close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.encode_line(message))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._child.socket.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read messages until the process closes its end."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    return  # it died while writing
                self._receive(wire.decode_report(line))

    def _receive(self, report: wire.Report) -> None:
        match report:
            case wire.Ready(info):
                if not self._info.done():
                    self._info.set_result(info)
                elif self._on_info is not None:
                    self._on_info(info)
            case wire.EngineFailed():
                self._failure = report
            case wire.Pong():
                self._pong.set()
