"""What every endpoint works with: the engine, the tokenizer, the limits, the live requests."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headwater.clock import Clock
from headwater.config import EngineConfig, ServerConfig
from headwater.engine.client import EngineClient
from headwater.engine.tokenizer import Tokenizer
from headwater.metrics.ledger import RequestRecord
from headwater.metrics.recorder import Recorder
from headwater.server.errors import RequestRefused
from headwater.server.live import LiveRequests

T = TypeVar("T")

_TOKENIZER_THREADS = 2

_RECENT = 64
"""Requests that ended and are still shown to whoever watches."""

_SHORT = 1 << 16
"""Characters up to which a text is short: milliseconds of work, never behind seconds of it."""


class Service:
    """Owns nothing of the engine; `close` ends the tokenizer's threads."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        clock: Clock,
        *,
        created_s: float,
        engine_config: EngineConfig | None = None,
        on_end: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.engine_config = engine_config
        """What the engine was asked to be, where the server started it; for `/server_info`."""
        self.clock = clock
        self.created = math.floor(created_s)
        """Seconds since 1970 when serving began."""
        self.is_stopping = False
        """Whether requests that are aborted now are so because the server goes away."""
        self.recorder = Recorder()
        self.live = LiveRequests(
            engine.info.max_num_seqs + config.limits.max_queued, self.recorder
        )
        self.reloading = asyncio.Lock()
        """Held while weights are read."""
        self.recent: deque[RequestRecord] = deque(maxlen=_RECENT)
        """Sequences that ended lately, the last one first."""
        self._on_end = on_end
        self._short = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="long-text")
        self._created_s = created_s
        self._start_s = clock.now()

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.engine.info.model_name

    @property
    def uptime_s(self) -> float:
        return self.clock.now() - self._start_s

    def unix_s(self) -> float:
        """Seconds since 1970, reckoned from the clock that was passed in."""
        return self._created_s + self.uptime_s

    def created_now(self) -> int:
        """The same in whole seconds, as answers have it."""
        return math.floor(self.unix_s())

    def end(self, record: RequestRecord) -> None:
        """A sequence ended: whoever keeps a ledger is told."""
        self.recent.appendleft(record)
        for tell in self._on_end:
            tell(record)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name not in (self.model_name, self.engine.info.model_dir):
            raise RequestRefused(
                f"the model {name!r} is not served here; {self.model_name!r} is",
                param="model",
                status=404,
                code="model_not_found",
            )

    async def in_thread(self, work: Callable[[], T], *, size: int) -> T:
        """Run tokenizer work on `size` characters or tokens off the event loop.

        Long texts wait for one another; a short one never waits for a long one.
        """
        threads = self._short if size <= _SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
