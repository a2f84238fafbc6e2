"""A whole engine without a model: real scheduler, real cache, EchoRunner, virtual clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.cache import CacheConfig, TieredCache
from headwater.cache.pool import SlotState
from headwater.clock import VirtualClock
from headwater.engine.core import EngineCore
from headwater.scheduler.batch import ScheduledBatch, StepResult
from headwater.scheduler.config import SchedulerConfig
from headwater.scheduler.request import Request, SamplingParams, SequenceOutput, Usage
from headwater.scheduler.results import StepOutputs
from headwater.scheduler.scheduler import Scheduler
from headwater.storage.base import StorageBackend
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.copiers import EchoCopier, HeldWorkers
from headwater.testing.runners import EchoRunner, echo_token
from headwater.transfer.mover import Mover, TransferConfig
from headwater.transfer.slab import HostSlab
from headwater.types import RequestId, WritePolicy

VOCAB_SIZE = 40
STEP_S = 0.01


def make_request(
    name: str,
    tokens: list[int],
    *,
    max_tokens: int = 8,
    priority: int = 0,
    cache_salt: str = "",
    arrival_s: float = 0.0,
    ignore_eos: bool = True,
    **params: object,
) -> Request:
    """A request with few parameters and a short output."""
    return Request(
        request_id=RequestId(name),
        tokens=np.array(tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params),  # type: ignore[arg-type]
        arrival_s=arrival_s,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_prompt(num_tokens: int, *, family: int = 0) -> list[int]:
    """The same tokens each time; prompts of one family have a common beginning."""
    return [(family * 7 + at * (family + 3)) % VOCAB_SIZE for at in range(num_tokens)]


def expected_tokens(
    request: Request, *, max_model_len: int = 10_000, eos: tuple[int, ...] = ()
) -> list[int]:
    """The output of the request alone: without cache, chunks or other rows."""
    params = request.params
    tokens: list[int] = request.tokens.tolist()
    # The grammar decides when an output is complete, so it overrides both settings.
    ignores_eos = params.ignore_eos and not params.grammar
    min_tokens = 0 if params.grammar else params.min_tokens
    stops = set(params.stop_token_ids) | (set() if ignores_eos else set(eos))
    start = len(tokens)
    while len(tokens) - start < params.max_tokens and len(tokens) < max_model_len:
        seen = np.array(tokens, dtype=np.int32)
        token = echo_token(seen, params, prompt_tokens=start, vocab_size=VOCAB_SIZE)
        tokens.append(token)
        if token in stops and len(tokens) - start >= min_tokens:
            break
    return tokens[start:]


def make_storage(block_tokens: int = 4) -> MemoryStorage:
    """Storage with room for every block."""
    form = BlockFormat(fingerprint=bytes(32), block_bytes=8 * block_tokens)
    return MemoryStorage(MemoryConfig(), form)


class NotingRunner(EchoRunner):
    """An EchoRunner that records the submitted batches."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.batches: list[ScheduledBatch] = []
        self.clock = VirtualClock()
        self.token_s = 0.0
        """Seconds to compute a token."""

    def submit(self, batch: ScheduledBatch) -> None:
        self.batches.append(batch)
        super().submit(batch)

    def collect(self) -> StepResult:
        before = self.num_tokens
        result = super().collect()
        self.clock.advance((self.num_tokens - before) * self.token_s)
        return result


@dataclass
class Harness:
    """An engine, and its outputs so far."""

    num_blocks: int = 64
    block_tokens: int = 4
    depth: int = 1
    layerwise: bool = False
    host_blocks: int = 0
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    stored: StorageBackend | None = None
    held: bool = False
    """Whether copies end only when the test says so."""
    rows_from: int = 1
    """With this many decoding sequences they are handled together; the real number would leave
    that path out of small tests."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)
    history: list[SequenceOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = TieredCache(
            CacheConfig(
                device_blocks=self.num_blocks,
                block_tokens=self.block_tokens,
                host_blocks=self.host_blocks,
                storage=self.stored is not None,
                write_policy=self.write_policy,
                write_ahead_blocks=4,
            )
        )
        config: dict[str, object] = {
            "max_model_len": 10_000,
            "prefix_wait_min_blocks": 1,
            "expected_output_tokens": 1,  # eager: small pools preempt
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**{**config, **self.settings}),  # type: ignore[arg-type]
            self.cache,
        )
        self.scheduler._table.rows.min_sequences = self.rows_from
        self.runner = NotingRunner(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            depth=self.depth,
            vocab_size=VOCAB_SIZE,
            layerwise=self.layerwise,
        )
        self.batches = self.runner.batches
        self.clock = self.runner.clock
        self.slab = HostSlab(self.host_blocks, self.runner.rows.shape[1])
        self.copier = EchoCopier(self.runner, self.slab, held=self.held)
        self.runner.arrive = self.copier.arrive
        self.storage = make_storage(self.block_tokens) if self.stored is None else self.stored
        self.workers = HeldWorkers(self.storage, self.slab, self.clock, held=self.held)
        workers = None if self.stored is None else self.workers
        mover = Mover(self.copier, workers, TransferConfig(**self.timeouts))
        self.core = EngineCore(self.scheduler, self.runner, self.clock, mover)

    def step(self) -> StepOutputs:
        """Run one turn, verify every invariant, and record the outputs."""
        outputs = self.core.step()
        self.clock.advance(STEP_S)
        self.check()
        for output in outputs:
            self._note(output)
        return outputs

    def run(self, *requests: Request, max_steps: int = 5_000) -> dict[str, list[int]]:
        """Add `requests` and run until there is no work; return every output so far."""
        self.add(*requests)
        for _ in range(max_steps):
            if not self.core.has_work:
                if not self.num_waiting or self.scheduler.stats().is_paused:
                    return self.outputs
                self.sleep()
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def run_until(self, name: str, *requests: Request, max_steps: int = 500) -> None:
        """Add `requests` and run until the request `name` has ended."""
        self.add(*requests)
        for _ in range(max_steps):
            if name in self.reasons:
                return
            self.step()
        raise AssertionError(f"{name} does not end")

    @property
    def num_waiting(self) -> int:
        return self.scheduler.stats().num_waiting

    def sleep(self) -> None:
        """Do what a loop without work does: nothing until a deadline."""
        sleep_s = self.core.sleep_s()
        assert sleep_s is not None, "all sequences wait, and none for a deadline"
        self.clock.advance(sleep_s)

    def add(self, *requests: Request) -> None:
        """Add requests to the queue."""
        for request in requests:
            self.core.add(request)

    def steps(self, count: int) -> None:
        """Turn the loop `count` times."""
        for _ in range(count):
            self.step()

    def names(self, step: int = -1) -> list[str]:
        """The requests in the `step`-th batch, or in the last one."""
        return list(self.batches[step].request_ids)

    def num_computed(self, name: str) -> int:
        """Tokens that were computed for one request, over all batches."""
        return sum(
            int(count)
            for batch in self.batches
            for row, count in zip(batch.request_ids, np.diff(batch.query_start), strict=True)
            if row == name
        )

    def check(self) -> None:
        """Check that every invariant holds and no step in flight uses a free slot."""
        self.core.check()
        free = self.cache._device.pool.owned(SlotState.FREE)
        early = np.intersect1d(free, self.runner.in_flight_slots())
        assert not len(early), f"slots {early} were freed with a step in flight"

    def check_empty(self) -> None:
        """Check that nothing is held, leased or in flight any more."""
        stats = self.cache.stats()
        assert (stats.device.held, stats.leases) == (0, 0)
        assert self.scheduler.num_in_flight == 0
        assert stats.device_evictable == stats.device.cached

    def _note(self, output: SequenceOutput) -> None:
        name = output.request_id
        assert name not in self.reasons, f"{name} goes on after its end"
        assert len(output.tokens) == len(output.logprobs)
        if output.usage is not None:
            assert name not in self.usages, f"{name} reports its usage twice"
            assert not self.outputs.get(name), f"{name} reports its usage late"
            self.usages[name] = output.usage
        self.outputs.setdefault(name, []).extend(output.tokens)
        self.history.append(output)
        if output.finish_reason is not None:
            self.reasons[name] = output.finish_reason
