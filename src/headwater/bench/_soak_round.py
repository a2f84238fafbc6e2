"""One round of the soak: a small engine, a random workload, and everything that can go wrong.

Everything, including time, comes from one seed, so a round that fails can be repeated.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

from headwater.clock import SystemClock, VirtualClock
from headwater.engine.client import ResetReport
from headwater.errors import InvariantError
from headwater.metrics.stats import EngineStats
from headwater.scheduler.request import Request
from headwater.storage.base import StorageBackend
from headwater.storage.codec import HEADER_BYTES
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.testing.copiers import HeldWorkers
from headwater.testing.faults import BYTE_FAULTS, Fault, FaultyStorage, damage
from headwater.testing.media import MemoryMedium
from headwater.testing.tiers import (
    VOCAB_SIZE,
    EchoTiers,
    echo_format,
    make_echo_request,
    uncached_tokens,
)
from headwater.transfer.workers import Task
from headwater.types import BlockKey, RequestId, WritePolicy

RESETS = (("device",), ("host",), ("device", "host"), ("device", "host", "storage"))
"""Tiers that a reset may name."""

_MAX_TURNS = 50_000
_STEP_S = 0.01
_CALL_FAULTS = (Fault.ERROR, Fault.TIMEOUT, Fault.REFUSED)
_TIMEOUTS = {
    "copy_timeout_s": 0.05,
    "read_timeout_s": 0.04,
    "write_timeout_s": 0.06,
    "lookup_timeout_s": 0.03,
}


def count_results(
    counts: Counter[str],
    stats: EngineStats,
    outputs: Mapping[str, Sequence[int]],
    reasons: Mapping[str, str],
) -> None:
    """Add tokens, aborts, preemptions, hits by tier and failures by link to `counts`."""
    counts["tokens"] += sum(map(len, outputs.values()))
    counts["aborts"] += sum(reason == "abort" for reason in reasons.values())
    counts["preemptions"] += stats.num_preemptions
    for tier, found in stats.found_tokens.items():
        counts[f"tokens found on {tier}"] += found
    for link, totals in stats.links.items():
        for reason, count in totals.failures.items():
            counts[f"{link} {reason}"] += count


class EchoRound:
    """A workload on an engine whose executors are unreliable; `run` it once."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        """Storage is in `folder`, or in memory if that is None."""
        self._dice = Random(seed)
        self._block_tokens = self._dice.choice((2, 4, 8))
        self._requests = self._make_requests()
        self._memory: MemoryStorage | None = None
        self._storage = self._open_storage(folder)
        self._clock = VirtualClock()
        self._engine = self._make_engine()
        self._hung: list[Task] = []
        """Storage calls that have begun and do not return."""
        self._returns = self._dice.random() < 0.7
        """Whether hung calls may return while requests run; otherwise they return after every
        request has ended."""
        self._added: list[Request] = []
        self._aborted: set[RequestId] = set()
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Serve everything, let every executor return, check the invariants, and return the
        counts.

        Raises InvariantError if an invariant is violated or a request does not end.
        """
        pending = list(self._requests)
        for turn in range(_MAX_TURNS):
            if pending and self._dice.random() < 0.3:
                self._added.append(pending.pop())
                self._engine.core.add(self._added[-1])
            self._disturb()
            self._work()
            self._turn()
            if turn % 16 == 0:
                self._engine.core.check()
            if not pending and len(self._engine.reasons) == len(self._requests):
                self.counts["calls that never returned"] += len(self._hung)
                self._finish()
                return self._account()
        raise InvariantError(f"requests are stuck: {self._engine.core.stats()}")

    def close(self) -> None:
        """Release the storage."""
        self._engine.core.close()

    def _turn(self) -> None:
        core = self._engine.core
        if core.has_work:
            self._engine.step()
            self._clock.advance(_STEP_S)
        elif (sleep_s := core.sleep_s()) is not None and self._dice.random() < 0.2:
            self._clock.advance(sleep_s)

    def _disturb(self) -> None:
        """Abort requests, reset tiers and damage blocks, at random."""
        dice, core = self._dice, self._engine.core
        if dice.random() < 0.005:
            core.reset_cache(dice.choice(RESETS), self._note_reset)
            self.counts["resets"] += 1
        if dice.random() < 0.01:
            self._abort()
        if self._memory is not None and dice.random() < 0.03:
            self._rot(self._memory)

    def _note_reset(self, report: ResetReport) -> None:
        self.counts["resets refused"] += report.refusal is not None

    def _abort(self) -> None:
        """Abort one request that waits, loads or runs."""
        alive = [r for r in self._added if r.request_id not in self._engine.reasons]
        if alive:
            victim = self._dice.choice(alive).request_id
            self._engine.core.abort(victim)
            self._aborted.add(victim)

    def _rot(self, memory: MemoryStorage) -> None:
        whole = HEADER_BYTES + echo_format(self._block_tokens).block_bytes
        keys: list[BlockKey] = sorted(k for k, v in memory.values.items() if len(v) == whole)
        if len(keys) < 2:
            return
        damage(MemoryMedium(memory), self._dice.sample(keys, 2), self._dice.choice(BYTE_FAULTS))
        self.counts["blocks damaged"] += 1

    def _work(self) -> None:
        """Let some copies and calls end, successfully or not, and let some executors write
        garbage to their targets."""
        copier, dice = self._engine.copier, self._dice
        for job in list(copier.pending):
            roll = dice.random()
            if roll < 0.5:
                copier.finish(job)
            elif roll < 0.6:
                copier.finish(job, num_blocks=dice.randint(0, 3))
                self.counts["copies cut short"] += 1
            elif roll < 0.8:
                copier.scribble(job)
        workers = self._workers
        if dice.random() < 0.1 and workers.tasks and workers.tasks[0].claim():
            self._hung.append(workers.tasks.pop(0))
            self.counts["calls hung"] += 1
        if dice.random() < 0.6:
            workers.work_off()
        if self._returns and dice.random() < 0.1:
            self._return_late()

    def _return_late(self) -> None:
        for task in self._hung:
            self._workers.run(task)
        self._hung.clear()

    def _finish(self) -> None:
        """Let every executor return."""
        for _ in range(_MAX_TURNS):
            if not self._engine.scheduler.num_copies and not self._engine.core.has_work:
                return
            for job in list(self._engine.copier.pending):
                self._engine.copier.finish(job)
            self._return_late()
            self._workers.work_off()
            self._engine.step()
        raise InvariantError(f"copies are stuck: {self._engine.core.stats()}")

    def _account(self) -> Counter[str]:
        """Check every invariant and every token; return what happened."""
        engine, counts = self._engine, self.counts
        try:
            engine.check_idle()
        except AssertionError as error:
            raise InvariantError(str(error)) from error
        for request in self._requests:
            counts["wrong tokens"] += self._num_wrong(request)
        stats = engine.core.stats()
        counts["requests"] += len(self._requests)
        count_results(counts, stats, engine.outputs, engine.reasons)
        return counts

    def _num_wrong(self, request: Request) -> int:
        name = request.request_id
        right, got = uncached_tokens(request), self._engine.outputs.get(name, [])
        if name not in self._aborted:
            missing = abs(len(right) - len(got))
            return missing + sum(a != b for a, b in zip(right, got, strict=False))
        return sum(a != b for a, b in zip(right, got, strict=False))

    @property
    def _workers(self) -> HeldWorkers:
        workers = self._engine.workers
        assert isinstance(workers, HeldWorkers)
        return workers

    def _make_requests(self) -> list[Request]:
        """Prompts of few families, so that they share prefixes and return."""
        dice = self._dice
        return [
            make_echo_request(
                f"r{number}",
                _prompt(dice.randrange(4), dice.randint(1, 60)),
                max_tokens=dice.randint(1, 24),
                cache_salt=dice.choice(("", "", "tenant")),
            )
            for number in range(dice.randint(10, 50))
        ]

    def _open_storage(self, folder: Path | None) -> StorageBackend:
        form = echo_format(self._block_tokens)
        script = {
            name: [self._dice.choice(_CALL_FAULTS) if self._dice.random() < 0.1 else None
                   for _ in range(2000)]
            for name in ("contains", "read", "write")
        }  # fmt: skip
        if folder is None:
            self._memory = MemoryStorage(MemoryConfig(), form)
            return FaultyStorage(self._memory, script)
        config = FileConfig(
            path=str(folder), capacity_bytes=1 << 20, slab_bytes=1 << 18, reserve_bytes=0
        )
        return FaultyStorage(FileStorage(config, form, SystemClock()), script)

    def _make_engine(self) -> EchoTiers:
        """An engine whose pools barely hold one request."""
        dice = self._dice
        longest = max(len(r.tokens) + r.params.max_tokens for r in self._requests)
        engine = EchoTiers(
            num_blocks=-(-longest // self._block_tokens) + dice.randint(0, 12),
            host_blocks=dice.choice((2, 8, 40, 120)),
            block_tokens=self._block_tokens,
            depth=dice.choice((1, 2)),
            layerwise=dice.random() < 0.5,
            write_policy=dice.choice(list(WritePolicy)),
            storage=self._storage,
            clock=self._clock,
            threads=False,
            held=True,
            timeouts=_TIMEOUTS,
            settings={
                "max_num_seqs": dice.choice((1, 4, 8)),
                "max_batched_tokens": 16,
                "prefix_wait_min_blocks": 1,
                "load_policy": dice.choice(("priced", "best_effort", "wait", "deadline")),
                "load_timeout_s": dice.choice((0.0, 0.03, 1.0)),
                "max_write_blocks": dice.choice((1, 3, 64)),
            },
        )
        engine.copier.fails = lambda transfer: dice.random() < 0.05
        return engine


def _prompt(family: int, num_tokens: int) -> list[int]:
    return [(family * 7 + at * (family + 3)) % VOCAB_SIZE for at in range(num_tokens)]
