"""What every endpoint uses: the engine, the tokenizer, the limits and the live requests."""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from typing import TypeVar

from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.engine.client import EngineClient
from headwater.engine.grammar import GrammarCompiler
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import QueueFull, RequestError
from headwater.metrics import names
from headwater.metrics.ledger import RequestRecord
from headwater.metrics.rates import ServerRates
from headwater.metrics.recorder import Recorder
from headwater.server.answers import RouterHealth
from headwater.server.body_parser import BodyParser
from headwater.server.config import ServerConfig
from headwater.server.errors import RequestRefused
from headwater.server.fair_share import FairShare
from headwater.server.parsing.model_output import ModelOutput
from headwater.server.response_store import ResponseStore
from headwater.server.shared_state import (
    AbortScope,
    LocalState,
    SharedState,
    WorkerSnapshot,
)
from headwater.types import RequestId

T = TypeVar("T")

_TOKENIZER_THREADS = 2

_GRAMMAR_THREADS = 2
_COMPILE_TIMEOUT_S = 10.0

MAX_RECENT = 64
"""Finished sequences that `/stats` still shows."""

_FEW_SCORED_TOKENS = 128
"""The log-probabilities of this many tokens, with 20 alternatives each, are written in 5 ms."""

_SHORT_CHARS = 1 << 16
"""A text up to this length takes milliseconds to tokenize. Such texts have separate threads, so
they never wait for a text that takes seconds."""


class LiveRequests:
    """The running sequences of each request id of this worker, and the limit on all of them.

    Two requests may have the same request id; the engine's sequence ids are always unique. The
    engine applies the same limit to the sequences of all workers together.
    """

    def __init__(self, max_sequences: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._max_sequences = max_sequences
        self._sequences: dict[str, list[RequestId]] = {}
        self._owners: dict[RequestId, str] = {}
        self._waits: dict[RequestId, asyncio.Timeout] = {}
        """Timeouts of the sequences that wait for a place in the engine; see `waiting`."""
        self.num_sequences = 0

    def check_size(self, num_sequences: int) -> None:
        """Raise RequestError if one request with `num_sequences` is over the limit."""
        if num_sequences > self._max_sequences:
            raise RequestError(
                f"the request has {num_sequences} sequences; this server takes at most "
                f"{self._max_sequences} at once. Send fewer prompts or choices (n)"
            )

    @contextmanager
    def enter(
        self, name: str, num_sequences: int, owner: str = ""
    ) -> Iterator[list[RequestId]]:
        """A context with sequence ids for the request `name` of the key `owner`. They are
        counted as live until its end.

        Raises QueueFull when too many sequences are live now, RequestError when this request
        alone is over the limit. Nothing changes then.
        """
        self.check_size(num_sequences)
        if self.num_sequences + num_sequences > self._max_sequences:
            self._recorder.count(names.REFUSED)
            raise QueueFull(
                f"{self.num_sequences} sequences are running or waiting, the limit is "
                f"{self._max_sequences}; retry later"
            )
        stem = f"{name}-{secrets.token_hex(6)}"
        ids = [RequestId(f"{stem}-{place}") for place in range(num_sequences)]
        self.num_sequences += num_sequences
        self._sequences.setdefault(name, []).extend(ids)
        self._owners.update((entry, owner) for entry in ids)
        try:
            yield ids
        finally:
            self.num_sequences -= num_sequences
            for entry in ids:
                del self._owners[entry]
            left = [entry for entry in self._sequences[name] if not entry.startswith(stem)]
            if left:
                self._sequences[name] = left
            else:
                del self._sequences[name]

    @asynccontextmanager
    async def waiting(self, ids: Sequence[RequestId]) -> AsyncIterator[asyncio.Timeout]:
        """A context in which the sequences wait for a place in the engine. `abort_waiting` ends
        the wait early: then the timeout that this context yields has an end (`when`)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as wait:
                self._waits |= dict.fromkeys(ids, wait)
                try:
                    yield wait
                finally:
                    for entry in ids:
                        del self._waits[entry]

    def abort_waiting(self, ids: Iterable[str] | None) -> int:
        """End the waits of these sequences, or of all; return how many there were."""
        wanted = list(self._waits) if ids is None else [RequestId(name) for name in ids]
        known = [self._waits[entry] for entry in wanted if entry in self._waits]
        waits = [wait for wait in known if wait.when() is None]
        for wait in waits:
            wait.reschedule(asyncio.get_running_loop().time())
        return len(waits)

    def sequences_of(self, name: str) -> list[RequestId]:
        """The engine's ids of the sequences that run for this request id."""
        return list(self._sequences.get(name, ()))

    def sequences_of_owner(self, owner: str) -> set[RequestId]:
        """The engine's ids of the sequences that run for a key."""
        return {entry for entry, other in self._owners.items() if other == owner}

    def owners(self) -> dict[str, str]:
        """The name of the key of each live sequence that has a named key."""
        return {entry: owner for entry, owner in self._owners.items() if owner}


def make_fair_share(max_num_seqs: int) -> FairShare:
    """A `FairShare` that lets slightly more sequences into the engine than one step computes."""
    return FairShare(max_num_seqs + max(4, max_num_seqs // 8))


def make_response_store(config: ServerConfig) -> ResponseStore:
    """A store within the limits of `config`."""
    limits = config.limits
    return ResponseStore(
        max_responses=limits.max_stored_responses,
        max_bytes=limits.max_stored_bytes,
        lifetime_s=limits.stored_lifetime_s,
    )


class Service:
    """Shared state of the endpoints. It does not own the engine; `close` ends its threads."""

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
        """The engine's settings, for `/server_info`; None when another process started it."""
        self.clock = clock
        self.created = math.floor(created_s)
        """Unix time when serving began."""
        self.is_stopping = False
        """Set while the server drains; aborted requests can then continue elsewhere."""
        self.recorder = Recorder()
        self.live = LiveRequests(
            engine.info.max_num_seqs + config.limits.max_queued, self.recorder
        )
        self.router_health: dict[str, RouterHealth] = {}
        """Result of the last heartbeat to the router; None without one."""
        self.parser = BodyParser(max_ids=engine.info.max_model_len)
        self.reloading = asyncio.Lock()
        """Held while weights are reloaded."""
        self.recent: deque[tuple[str, RequestRecord]] = deque(maxlen=MAX_RECENT)
        """Finished sequences with their keys, newest first."""
        seats = engine.info.max_num_seqs
        self.shared: SharedState = LocalState(
            self, make_fair_share(seats), make_response_store(config), clock
        )
        """State of all HTTP workers."""
        self.last_minute: ServerRates | None = None
        """Rates of the last minute, in the worker that samples the history."""
        self._on_end = on_end
        self._short = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="long-text")
        self._compilers = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self._grammars = GrammarCompiler(
            tokenizer.to_json,
            vocab_size=engine.info.vocab_size,
            eos_token_ids=engine.info.eos_token_ids,
        )
        self.model_output = ModelOutput.choose(
            config.tool_call_parser, config.reasoning_parser, tokenizer
        )
        """The formats of the model's tool calls and reasoning."""
        self._created_s = created_s
        self._start_s = clock.now()

    def join(self, shared: SharedState, *, started_s: float) -> None:
        """Become one worker of several; the server began to serve at `started_s`."""
        self.shared = shared
        self._start_s = started_s

    def snapshot(self) -> WorkerSnapshot:
        """What this worker counts and runs."""
        return WorkerSnapshot(
            counts=self.recorder.snapshot(),
            owners=self.live.owners(),
            recent=[(owner, record.as_log()) for owner, record in self.recent],
        )

    async def abort_here(self, scope: AbortScope) -> int:
        """Abort requests of this worker; return how many were running."""
        if scope.names is None and scope.owner is None:
            return await self._abort(None)
        own = None if scope.owner is None else self.live.sequences_of_owner(scope.owner)
        if scope.names is None:
            return await self._abort(sorted(own or ()))
        found = [entry for name in scope.names for entry in self.live.sequences_of(name)]
        return await self._abort([e for e in found if own is None or e in own])

    async def _abort(self, ids: Sequence[str] | None) -> int:
        return self.live.abort_waiting(ids) + await self.engine.abort(ids)

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.engine.info.model_name

    @property
    def uptime_s(self) -> float:
        return self.clock.now() - self._start_s

    def unix_s(self) -> float:
        """Unix time, computed from the clock that was passed in."""
        return self._created_s + self.uptime_s

    def created_now(self) -> int:
        """Unix time in whole seconds, as responses state it."""
        return math.floor(self.unix_s())

    def end(self, record: RequestRecord, owner: str = "") -> None:
        """Report a finished sequence of the key `owner` to logs and traces."""
        self.recent.appendleft((owner, record))
        for report in self._on_end:
            report(record)

    def check_model(self, name: str | None) -> None:
        """Raise RequestRefused (404) for a model this server does not serve."""
        if name is not None and name not in (self.model_name, self.engine.info.model_dir):
            raise RequestRefused(
                f"the model {name!r} does not exist here; this server serves "
                f"{self.model_name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

    async def in_thread(self, work: Callable[[], T], *, size: int) -> T:
        """Run tokenizer work on `size` characters or tokens in a thread.

        Long texts wait for one another; a short text never waits for a long one.
        """
        threads = self._short if size <= _SHORT_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def convert(self, work: Callable[[], T], *, size: int) -> T:
        """Run `work` on a body of `size` bytes: a short one in place, a long one in a thread."""
        return work() if size <= _SHORT_CHARS else await self.in_thread(work, size=size)

    async def convert_logprobs(self, work: Callable[[], T], num_tokens: int) -> T:
        """Run `work`, which writes the log-probabilities of this many tokens: many tokens in a
        thread."""
        if num_tokens <= _FEW_SCORED_TOKENS:
            return work()
        return await self.in_thread(work, size=num_tokens * _SHORT_CHARS)

    def new_response_id(self, request_id: str, cache_salt: str) -> str:
        """An id that tells a router which instance has the response. It is the same for every
        attempt at one request, so a stream that is continued on another instance keeps it."""
        digest = sha256(f"{cache_salt}\n{request_id}".encode()).hexdigest()[:24]
        return f"resp_{self.engine.info.server_id or 'local'}_{digest}"

    async def check_grammar(self, grammar: str, *, param: str) -> None:
        """Compile a grammar in a thread. Raises RequestRefused, naming `param`, if it is wrong,
        unsupported or takes too long."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_COMPILE_TIMEOUT_S):
                await loop.run_in_executor(self._compilers, self._grammars.check, grammar)
        except TimeoutError as exc:
            raise RequestRefused(
                f"the grammar was not compiled within {_COMPILE_TIMEOUT_S:g} s; simplify it",
                param=param,
            ) from exc
        except RequestError as exc:
            raise RequestRefused(str(exc), param=param) from exc

    def close(self) -> None:
        """End the threads and processes. Calling it twice is safe."""
        self.parser.close()
        for threads in (self._short, self._long, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)
