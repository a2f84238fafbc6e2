"""Records the requests of a server, so that `headwater replay` can repeat them.

Each line is one JSON object: when a request came, its lengths, and a key for each full block of
its prompt and output. Keys are salted with a secret that is never written and is dropped at the
end. So equal blocks of one recording have equal keys, and a reader cannot test which text a key
stands for. The file contains no text, tokens or names.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from queue import Full, Queue
from threading import Thread

import numpy as np

from headwater.cache import KeyScheme, Namespace
from headwater.engine.front import AsyncEngine
from headwater.engine.record_file import RecordTarget
from headwater.scheduler.request import Request, SequenceOutput

log = logging.getLogger(__name__)

_MAX_PENDING = 256
"""Maximum number of requests that wait to be written. Further requests are dropped and counted;
no request waits."""

_KEY_HEX = 16
_CLOSE_S = 5.0

Entry = tuple[Request, list[int]]


class Recording:
    """Writes the requests of one worker to the recording, in a thread of its own."""

    def __init__(self, target: RecordTarget) -> None:
        self._target = target
        self._queue: Queue[Entry | None] = Queue(_MAX_PENDING)
        self._thread = Thread(target=self._work, name="recording", daemon=True)
        self.num_dropped = 0
        """Requests missing in the recording, because writing was slower than serving."""

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def note(self, request: Request, output: list[int]) -> None:
        """Queue a request that ended with `output` to be written. Never waits."""
        try:
            self._queue.put_nowait((request, output))
        except Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write the waiting requests, within a few seconds. Calling it twice is safe."""
        if not self._thread.is_alive():
            return
        with suppress(Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        if self.num_dropped:
            log.warning(
                "requests missing in the recording, because writing was too slow: count=%d",
                self.num_dropped,
            )

    def _work(self) -> None:
        target = self._target
        scheme = KeyScheme(block_tokens=target.block_tokens, fingerprint=target.secret)
        try:
            while (entry := self._queue.get()) is not None:
                line = json.dumps(self._line(scheme, *entry)) + "\n"
                os.write(target.descriptor, line.encode())
        except (OSError, ValueError):
            log.exception(
                "the recording cannot be written any more; further requests are not recorded"
            )

    def _line(
        self, scheme: KeyScheme, request: Request, output: list[int]
    ) -> dict[str, object]:
        whole = np.concatenate((request.tokens, np.array(output, dtype=np.int32)))
        root = scheme.root(Namespace(request.cache_salt))
        keys = scheme.chain(root, whole.tobytes(), None)
        return {
            "timestamp": round(1e3 * (request.arrival_s - self._target.start_s), 3),
            "input_length": len(request.tokens),
            "output_length": len(output),
            "keys": [key.hex()[:_KEY_HEX] for key in keys],
        }


class RecordedEngine(AsyncEngine):
    """An engine whose requests are recorded when they end."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._recording: Recording | None = None

    def record(self, target: RecordTarget) -> None:
        """Write to `target` from now on."""
        if self._recording is None:
            self._recording = Recording(target)
            self._recording.start()

    async def close(self) -> None:
        await super().close()
        if self._recording is not None:
            await asyncio.to_thread(self._recording.close)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        tokens: list[int] = []
        try:
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    tokens += output.tokens
                    yield output
        finally:
            if tokens and self._recording is not None:
                self._recording.note(request, tokens)
