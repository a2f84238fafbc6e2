"""The seam between servers and engines: `EngineClient`, and what an engine says of itself.

Implemented by `AsyncEngine` (a process behind a socket) and by the doubles in
`headwater.testing`. Needs neither, so a server can be built and tested without a model.
"""

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headwater.metrics.stats import EngineStats
from headwater.metrics.view import EngineView, ViewLimits
from headwater.scheduler.output import SequenceOutput
from headwater.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsInfo:
    """Where an engine's KV events are heard."""

    endpoint: str
    replay_endpoint: str
    topic: str
    buffer_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine fixed when it started; never changes while it runs."""

    model_name: str
    model_dir: str
    """Where the tokenizer is found."""

    max_model_len: int
    """Most tokens of prompt and output together."""

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

    tiers: tuple[str, ...] = ()
    """A line for each tier below the device: what it will do, as it was set up."""

    role: str = "mixed"
    """`mixed`, `prefill` or `decode`."""

    epoch: str = ""
    """Names this life of the engine: another after every restart."""

    kv_format: str = ""
    """Element type and layout of the KV bytes; with fingerprint and block size, what makes
    keys of two engines comparable."""

    kv_events: KvEventsInfo | None = None
    """None where nothing is published."""

    peer_address: str = ""
    """Where other instances reach this one, `HOST:PORT`; empty where it takes no peers."""

    @property
    def min_prefix_tokens(self) -> int:
        """Shortest beginning that two prompts must share for the second to find it. The last
        token of a prompt is always computed, so the prompt is at least one longer."""
        return self.block_tokens


TIERS = ("device", "host", "storage")
MEMORY = frozenset(("device", "host"))
"""What a reset is about unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """What came of a reset."""

    removed: dict[str, int] = field(default_factory=dict)
    """Blocks that were forgotten, by tier."""

    kept: dict[str, int] = field(default_factory=dict)
    """Blocks of those tiers that requests or copies are using; they go when that ends, or, where
    one tier alone was to be forgotten, stay."""

    refusal: str | None = None
    """Why storage was not forgotten, though memory was."""


class EngineClient(Protocol):
    """Asked by the server, from one event loop; every method is cancellation-safe."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, or None while it lives."""

    @property
    def num_violations(self) -> int:
        """Broken invariants that it told of; the first one ends it."""

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs until one has a finish reason. Closing the iterator early aborts.

        Raises RequestError where the engine refuses the request, EngineDead where it dies.
        """

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End these requests (None: all) with finish reason `abort`; how many were alive."""

    async def reset_cache(self, tiers: Collection[str] = MEMORY) -> ResetReport:
        """Forget every cached block of `tiers`; running sequences keep theirs. RequestError
        where that cannot be."""

    async def close_session(self, session_id: str, cache_salt: str) -> bool:
        """Nothing more of this session will come; whether it was known."""

    async def reload(self, folder: str | None) -> EngineInfo:
        """Read weights, of `folder` or of the same one again; `info` from now on.

        Raises RequestError where they cannot be read now, or not be used.
        """

    async def pause(self) -> None:
        """Stop admitting; running sequences go on."""

    async def resume(self) -> None:
        """Admit again."""

    async def stats(self) -> EngineStats:
        """A snapshot between two steps."""

    async def view(self, limits: ViewLimits) -> EngineView:
        """A look at everything between two steps, as much of it as `limits` allow."""
