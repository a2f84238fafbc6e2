"""Records what a served engine is asked, so that `headwater replay` can play it again.

One JSON object a line: when a request came, how long it was, and a key for each full block of
its prompt and output. Keys are salted with a secret that is never written and thrown away at
the end: equal blocks have equal keys in one recording, and nobody can try out what they were.
No text, no token, no name is in it.
"""

import json
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import TextIO

import numpy as np

from headwater.cache import KeyScheme, Namespace
from headwater.clock import Clock
from headwater.engine.child import EngineChild
from headwater.engine.front import AsyncEngine
from headwater.errors import ConfigError
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.request import Request

log = logging.getLogger(__name__)

VERSION = 1
_MAX_PENDING = 256
"""Requests that wait to be written; more are dropped and counted, and nobody waits."""

_KEY_HEX = 16
_CLOSE_S = 5.0

Entry = tuple[Request, list[int]]


class Recording:
    """A file that requests are written to by a thread of its own."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises ConfigError where `path` exists or cannot be made."""
        self._path = path
        self._start_s = clock.now()
        self._queue: Queue[Entry | None] = Queue(_MAX_PENDING)
        self._thread: Thread | None = None
        self.num_dropped = 0
        """Requests that are not in the recording, because writing was slower than serving."""
        try:
            self._file: TextIO = path.open("x", encoding="utf-8")
            path.chmod(0o600)
        except FileExistsError as exc:
            raise ConfigError(
                f"--record {path} exists; a recording overwrites nothing"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"cannot write --record {path}: {exc.strerror}") from exc

    def begin(self, block_tokens: int) -> None:
        """Blocks are of so many tokens; from now on requests are taken."""
        scheme = KeyScheme(block_tokens=block_tokens, fingerprint=secrets.token_bytes(32))
        header = {"headwater_recording": VERSION, "block_tokens": block_tokens}
        self._file.write(json.dumps(header) + "\n")
        self._thread = Thread(target=self._work, args=(scheme,), name="recording", daemon=True)
        self._thread.start()

    def note(self, request: Request, output: list[int]) -> None:
        """A request ended with `output`. Never waits."""
        try:
            self._queue.put_nowait((request, output))
        except Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what waits, for a few seconds at most. Twice is safe."""
        if self._file.closed:
            return
        if self._thread is None:
            self._path.unlink(missing_ok=True)  # nothing was served: leave nothing behind
        else:
            with suppress(Full):
                self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
            if self.num_dropped:
                log.warning("the recording lacks %d requests", self.num_dropped)
        self._file.close()

    def _work(self, scheme: KeyScheme) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._file.write(json.dumps(self._line(scheme, *entry)) + "\n")
                if self._queue.empty():
                    self._file.flush()
        except (OSError, ValueError):
            log.exception("the recording ended early")

    def _line(
        self, scheme: KeyScheme, request: Request, output: list[int]
    ) -> dict[str, object]:
        whole = np.concatenate((request.tokens, np.array(output, dtype=np.int32)))
        root = scheme.root(Namespace(request.cache_salt))
        keys = scheme.chain(root, whole.tobytes(), None)
        return {
            "timestamp": round(1e3 * (request.arrival_s - self._start_s), 3),
            "input_length": len(request.tokens),
            "output_length": len(output),
            "keys": [key.hex()[:_KEY_HEX] for key in keys],
        }


class RecordedEngine(AsyncEngine):
    """An engine whose requests go into a recording as they end."""

    def __init__(self, child: EngineChild, recording: Recording) -> None:
        """`recording` belongs to this object from now on."""
        super().__init__(child)
        self._recording = recording

    async def start(self, *, timeout_s: float) -> None:
        await super().start(timeout_s=timeout_s)
        self._recording.begin(self.info.block_tokens)

    async def close(self) -> None:
        await super().close()
        self._recording.close()

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        tokens: list[int] = []
        try:
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    tokens += output.tokens
                    yield output
        finally:
            if tokens:
                self._recording.note(request, tokens)
