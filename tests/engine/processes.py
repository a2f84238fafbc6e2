"""An engine process and a client of it in one test process, without a supervisor."""

import asyncio

import msgspec

from headwater.engine.engine_process import EngineProcess
from headwater.engine.recorded import RecordedEngine
from headwater.engine.rundir import RunDir
from headwater.engine.wire import EngineStart

ECHO = ["headwater.testing.engines"]


class OwnedEngine(RecordedEngine):
    """A client that owns its engine process: `start`, use, `close`."""

    def __init__(self, settings=b"{}", command=ECHO, **start):
        super().__init__("0.0")
        self.rundir = RunDir()
        self._settings = EngineStart(settings=msgspec.Raw(settings), **start)
        self._command = command
        self._died = asyncio.Event()

    async def start(self, *, timeout_s=60):
        self.process = EngineProcess(self._command, self._settings, self.rundir.address(0))
        try:
            info = await self.process.start(timeout_s=timeout_s)
        except BaseException:
            self.rundir.close()
            raise
        self.attach(self.process.address, info)
        self._watching = asyncio.create_task(self._watch())
        return self

    @property
    def pid(self):
        return self.process.pid

    async def wait_dead(self):
        await self._died.wait()
        return self.dead

    async def close(self):
        await super().close()
        self.code = await self.process.stop()
        await self._watching
        self.rundir.close()

    async def _watch(self):
        reason = await self.process.wait()
        self.num_violations += self.process.has_broken_invariant
        self.lose(reason)
        self._died.set()
