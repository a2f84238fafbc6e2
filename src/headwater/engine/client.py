"""The interface between servers and engines: `EngineClient`, its control calls, and
`EngineInfo`.

`AsyncEngine` (a process behind a socket) and the doubles in `headwater.testing` implement it.
This module imports neither, so a server can be built and tested without a model.

A control call is an operation on a running engine that is not a request for tokens. It is a
frozen value that names the type of its reply. To add one: define it here, handle it in
`EngineCore.control`, and pass it to `EngineClient.control`. The socket protocol needs no change,
because `wire` encodes every call and every reply by the types given here.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, get_args

from headwater.errors import RequestError
from headwater.metrics.stats import EngineStats
from headwater.metrics.view import EngineView, ViewLimits
from headwater.scheduler.request import Request, SequenceOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsInfo:
    """Where consumers connect to an engine's KV events."""

    endpoint: str
    replay_endpoint: str
    topic: str
    buffer_steps: int
    curve: bool = False
    """Whether consumers need the keys made from the peer token (ZMQ CURVE)."""

    token_ids: bool = False
    """Whether events carry token ids."""


SERVER_ID_VARIABLE = "HEADWATER_SERVER_ID"
"""Environment variable that tells an engine the id of its server."""


def server_of(epoch: str) -> str:
    """The id of the server, from the epoch of one of its engines."""
    return epoch.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of an engine. Only a reload of weights changes them."""

    model_name: str
    model_dir: str
    """The directory of the tokenizer."""

    max_model_len: int
    """Maximum number of tokens of prompt and output together."""

    vocab_size: int
    """Token ids are below this."""

    block_tokens: int
    num_device_blocks: int
    max_num_seqs: int
    fingerprint: str
    """Hex content hash of weights and config."""

    eos_token_ids: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    num_host_blocks: int = 0
    block_bytes: int = 0
    """KV of one block over all layers."""

    limits: str = ""
    """The largest step, as a sentence for the operator."""

    tiers: tuple[str, ...] = ()
    """One line for each tier below the device, with its settings."""

    role: str = "mixed"
    """`mixed`, `prefill` or `decode`."""

    epoch: str = ""
    """Identifies this life of the engine; it changes with every restart. The part before the
    dot identifies the server, whose stored responses outlive an engine."""

    kv_format: str = ""
    """Element type and layout of the KV bytes. Block keys of two engines are comparable if
    this, the fingerprint and the block size are equal."""

    kv_events: KvEventsInfo | None = None
    """None if no events are published."""

    peer_address: str = ""
    """Address for other instances, `HOST:PORT`; empty if this one accepts no peers."""

    warnings: tuple[str, ...] = ()
    """Problems found at start, for `/health`."""

    @property
    def server_id(self) -> str:
        """The part of the epoch that a restart of the engine does not change."""
        return server_of(self.epoch)

    @property
    def min_prefix_tokens(self) -> int:
        """Shortest common beginning of two prompts for which the second one can have a hit. The
        last token of a prompt is always computed, so the prompt has at least one token more."""
        return self.block_tokens


TIERS = ("device", "host", "storage")
MEMORY = frozenset(("device", "host"))
"""The tiers of a reset by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """The result of a reset."""

    removed: dict[str, int] = field(default_factory=dict)
    """Blocks that were removed, by tier."""

    kept: dict[str, int] = field(default_factory=dict)
    """Blocks of those tiers that requests or copies were using. They are removed when that use
    ends; in a reset of one tier alone they stay."""

    refusal: str | None = None
    """Why storage was not emptied although device and host were."""


R = TypeVar("R")

Answer = Callable[[Any, RequestError | None], None]
"""Receives the reply of a call, or the error with which it was refused. Called once."""


@dataclass(frozen=True)
class ControlCall(Generic[R]):
    """One operation, with arguments; `R` is the type of its reply."""


@dataclass(frozen=True)
class Pause(ControlCall[None]):
    """Stop admitting requests; running requests continue."""


@dataclass(frozen=True)
class Resume(ControlCall[None]):
    """Admit requests again."""


@dataclass(frozen=True)
class GetStats(ControlCall[EngineStats]):
    """Take a snapshot of all counts between two steps."""


@dataclass(frozen=True)
class GetView(ControlCall[EngineView]):
    """Take a snapshot of sequences and prefix tree between two steps."""

    limits: ViewLimits


@dataclass(frozen=True)
class ResetCache(ControlCall[ResetReport]):
    """Remove every cached block of `tiers`. Running sequences keep theirs. The reply may come
    many steps later. The call is refused if storage cannot be emptied."""

    tiers: frozenset[str] = MEMORY


@dataclass(frozen=True)
class CloseSession(ControlCall[bool]):
    """End a session. The reply says whether the session was known."""

    session_id: str
    cache_salt: str


@dataclass(frozen=True)
class ReloadWeights(ControlCall[EngineInfo]):
    """Read the weights of `folder`, or of the current folder again, when nothing runs and
    nothing is in flight.

    No request is admitted meanwhile. The call is refused if draining takes longer than
    `drain_timeout_s` or the weights cannot be used; then nothing has changed.
    """

    folder: str | None = None
    drain_timeout_s: float = 5.0


CALLS: dict[str, type[ControlCall[Any]]] = {
    call.__name__: call for call in ControlCall.__subclasses__()
}
"""Every call, by its name on the wire."""


def reply_type(call: type[ControlCall[R]]) -> Any:  # noqa: ANN401 -- a type, for a decoder
    """The type that `call` declares for its reply."""
    (kind,) = get_args(call.__orig_bases__[0])  # type: ignore[attr-defined]  # of Generic
    return kind


class EngineClient(Protocol):
    """The engine as the server uses it, from one event loop. Every method is
    cancellation-safe."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None while it lives."""

    @property
    def num_violations(self) -> int:
        """Violated invariants over all lives of the engine. Each violation ends one life."""

    @property
    def num_restarts(self) -> int:
        """Engines started after the first one."""

    def check_alive(self) -> None:
        """Raise EngineRestarting or EngineDead while no engine takes requests."""

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Yields outputs until one has a finish reason. Closing the iterator early aborts the
        request. Raises RequestError if the engine refuses the request, and EngineDead if it
        dies."""

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End these requests (None: all) with finish reason `abort`; return how many were
        running."""

    async def control(self, call: ControlCall[R]) -> R:
        """Execute `call` between two steps and return its reply. Raises RequestError if the
        engine refuses it, and EngineDead if the engine is dead."""
