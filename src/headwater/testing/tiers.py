"""An engine with host and storage tiers but no model: real bytes, loop, scheduler and cache.

The runner's KV, the host slab and the stored blocks hold the tokens themselves, so a block that
is copied or reused wrongly gives other tokens. With `threads`, storage is called from real
threads; without, the caller decides when each call is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headwater.cache import CacheConfig, TieredCache
from headwater.clock import Clock, SystemClock
from headwater.engine.core import EngineCore
from headwater.launch.kept_host import HostRecorder, KeptHost
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams, SequenceOutput, Usage
from headwater.scheduler.scheduler import Scheduler
from headwater.storage.base import StorageBackend
from headwater.storage.codec import BlockFormat
from headwater.testing.copiers import EchoCopier, HeldWorkers
from headwater.testing.runners import EchoRunner, echo_token
from headwater.transfer.mover import Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.transfer.workers import StorageWorkers
from headwater.types import RequestId, WritePolicy

VOCAB_SIZE = 50
MAX_MODEL_LEN = 10_000


def echo_format(block_tokens: int) -> BlockFormat:
    """The block format of an echo engine: token and position, four bytes each."""
    return BlockFormat(fingerprint=bytes(range(32)), block_bytes=8 * block_tokens)


def make_echo_request(
    name: str, tokens: list[int], *, max_tokens: int, cache_salt: str = ""
) -> Request:
    """A request that ends by length only."""
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_s=0.0,
        cache_salt=cache_salt,
    )


def make_eager_scheduler(cache: TieredCache, settings: Mapping[str, object]) -> Scheduler:
    """A scheduler that expects short outputs, so that small pools preempt."""
    config: dict[str, object] = {"max_model_len": MAX_MODEL_LEN, "expected_output_tokens": 1}
    return Scheduler(SchedulerConfig(**{**config, **settings}), cache)  # type: ignore[arg-type]


def uncached_tokens(request: Request) -> list[int]:
    """The output of the request without cache, tiers and other requests."""
    tokens: list[int] = request.tokens.tolist()
    start = len(tokens)
    for _ in range(request.params.max_tokens):
        seen = np.array(tokens, dtype=np.int32)
        tokens.append(
            echo_token(seen, request.params, prompt_tokens=start, vocab_size=VOCAB_SIZE)
        )
    return tokens[start:]


@dataclass(kw_only=True)
class RecordedOutputs:
    """The outputs of an engine so far, by request."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)

    def note(self, output: SequenceOutput) -> None:
        """Record one output. Raises AssertionError if its request has ended before."""
        name = output.request_id
        assert name not in self.reasons, f"{name} continues after its end"
        if output.usage is not None:
            self.usages[name] = output.usage
        self.outputs.setdefault(name, []).extend(output.tokens)
        if output.finish_reason is not None:
            self.reasons[name] = output.finish_reason


@dataclass(kw_only=True)
class EchoTiers(RecordedOutputs):
    """One engine with lower tiers, and its outputs so far."""

    num_blocks: int
    host_blocks: int
    block_tokens: int = 4
    depth: int = 1
    layerwise: bool = False
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage: StorageBackend | None = None
    clock: Clock = field(default_factory=SystemClock)
    threads: bool = True
    held: bool = False
    """Whether copies, and calls without threads, end only when the caller says so."""

    kept: KeptHost | None = None
    """Memory of the host tier that outlives the engine."""

    timeouts: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = TieredCache(
            CacheConfig(
                device_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                host_blocks=self.host_blocks,
                storage=self.storage is not None,
                write_policy=self.write_policy,
                write_ahead_blocks=4,
                record_host=self.kept is not None,
            )
        )
        self.scheduler = make_eager_scheduler(self.cache, self.settings)
        self.runner = EchoRunner(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            depth=self.depth,
            vocab_size=VOCAB_SIZE,
            layerwise=self.layerwise,
        )
        block_bytes = self.runner.rows.shape[1]
        if self.kept is None:
            self.slab = HostSlab(self.host_blocks, block_bytes)
        else:
            self.slab = self.kept.open_slab(self.host_blocks, block_bytes)
        self.copier = EchoCopier(self.runner, self.slab, held=self.held)
        self.runner.arrive = self.copier.arrive
        self.workers = self._make_workers()
        mover = Mover(self.copier, self.workers, TransferConfig(**self.timeouts))
        self.core = EngineCore(self.scheduler, self.runner, self.clock, mover)
        if self.kept is not None:
            directory = self.kept.adopt(self.cache, block_bytes, self.clock)
            recorder = HostRecorder(self.cache, directory, self.clock)
            mover.before_start, self.core.record_host = recorder.before_copies, recorder.record

    def step(self) -> None:
        """Run one turn of the loop and record the outputs."""
        for output in self.core.step():
            self.note(output)
        self.core.publish()

    def run(self, *requests: Request, within_s: float) -> None:
        """Serve `requests` to their end. Raises AssertionError if one does not end."""
        end_s = self.clock.now() + within_s
        for request in requests:
            self.core.add(request)
        while any(request.request_id not in self.reasons for request in requests):
            assert self.clock.now() < end_s, "a request is stuck"
            self.core.wait()
            self.step()

    def check_idle(self) -> None:
        """Check that every invariant holds and nothing is held, leased, quarantined or in
        flight."""
        self.core.check()
        stats = self.cache.stats()
        assert self.scheduler.num_copies == 0, "a copy is in flight"
        assert (stats.leases, stats.jobs) == (0, 0), f"kept: {stats}"
        for pool in (stats.device, stats.host):
            assert pool.free + pool.cached == pool.total, f"slots leaked: {pool}"

    def failures(self) -> dict[str, dict[str, int]]:
        """Failures of each link, by reason."""
        links = self.core.stats().links
        return {name: dict(link.failures) for name, link in links.items() if link.failures}

    def _make_workers(self) -> StorageWorkers | None:
        if self.storage is None:
            return None
        if self.threads:
            return StorageWorkers(self.storage, self.slab, self.clock)
        return HeldWorkers(self.storage, self.slab, self.clock, held=self.held)
