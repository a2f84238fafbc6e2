"""The soak on the built-in model: real attention over real copies, threads that fail at random.

The expected output is that of an engine without a cache, for each request alone. The workload
comes from the seed; which calls fail also depends on the threads, as in production.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from threading import Event, Lock
from typing import Any, Self

import numpy as np

from headwater.bench._soak_round import RESETS, count_results
from headwater.cache import JobStatus, TransferJob
from headwater.clock import SystemClock
from headwater.config import EngineConfig
from headwater.engine.core import EngineCore
from headwater.errors import InvariantError, StorageError, StorageTimeout
from headwater.launch.core import build_core
from headwater.scheduler.request import Request, SamplingParams
from headwater.storage import Opening, open_storage
from headwater.storage.base import BlockRead, BlockWrite, StorageBackend
from headwater.storage.forwarding import ForwardingStorage
from headwater.storage.memory import MemoryStorage
from headwater.testing.faults import BYTE_FAULTS, damage
from headwater.testing.media import MemoryMedium
from headwater.transfer.completions import JobCompletion
from headwater.transfer.mover import DeviceCopier
from headwater.transfer.workers import Report
from headwater.types import BlockKey, RequestId

_BLOCK_TOKENS = 16
_STUCK_S = 60.0
_DRAIN_S = 30.0
_FAMILIES = 4
_LONGEST = 200
_MAX_TOKENS = 24


class ShakyStorage(ForwardingStorage):
    """A backend whose calls randomly fail, take long, or find damaged bytes."""

    def __init__(self, backend: StorageBackend, seed: int) -> None:
        super().__init__(backend)
        self._dice = Random(seed)
        self._lock = Lock()

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        backend = open_storage(settings["backend"], settings["settings"], opening)
        return cls(backend, settings["seed"])

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        self._shake([])
        return super().contains(runs, timeout_s=timeout_s)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._shake(keys)
        return super().read(keys, into, timeout_s=timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        if self._roll() < 0.05:
            return [BlockWrite.REFUSED] * len(keys)
        self._shake([])
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def _shake(self, keys: Sequence[BlockKey]) -> None:
        roll = self._roll()
        if roll < 0.05:
            raise StorageError("failed at random")
        if roll < 0.1:
            raise StorageTimeout("a call was chosen at random to be too late")
        if roll < 0.2:
            Event().wait(roll / 4)
        elif roll < 0.3 and isinstance(self._backend, MemoryStorage):
            with self._lock:
                present = [key for key in keys if key in self._backend.values]
                if len(present) > 1:
                    damage(MemoryMedium(self._backend), present, self._dice.choice(BYTE_FAULTS))

    def _roll(self) -> float:
        with self._lock:
            return self._dice.random()


class ShakyCopier:
    """A copier of which some jobs fail."""

    def __init__(self, copier: DeviceCopier, dice: Random) -> None:
        self._copier = copier
        self._dice = dice

    def start(self, transfer: TransferJob, report: Report) -> None:
        if self._dice.random() < 0.05:
            report(JobCompletion(transfer.job, JobStatus.FAILED, reason="error"))
        else:
            self._copier.start(transfer, report)

    def close(self) -> None:
        self._copier.close()


@dataclass
class RightTokens:
    """The output of the model without a cache, computed once for each prompt."""

    folder: Path

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, int], list[int]] = {}

    @cached_property
    def _core(self) -> EngineCore:
        config = EngineConfig(
            model=str(self.folder),
            num_threads=1,
            num_blocks_override=64,
            block_tokens=_BLOCK_TOKENS,
            prefix_caching=False,
        )
        return build_core(config)[0]

    def of(self, family: int, num_tokens: int) -> list[int]:
        """The longest output of one prompt; shorter ones are its beginnings."""
        if (family, num_tokens) not in self._known:
            request = make_request("alone", family, num_tokens, _MAX_TOKENS)
            self._core.add(request)
            tokens: list[int] = []
            while self._core.has_work:
                for output in self._core.step():
                    tokens += output.tokens
            self._known[family, num_tokens] = tokens
        return self._known[family, num_tokens]


class ModelRound:
    """A workload on the built-in model with tiers that fail; `run` it once."""

    def __init__(self, seed: int, folder: Path | None, right: RightTokens) -> None:
        """Storage is in `folder`, or in memory if that is None."""
        self._dice = Random(seed)
        self._right = right
        self._wanted = [
            (self._dice.randrange(_FAMILIES), self._dice.randrange(8, _LONGEST, 12))
            for _ in range(self._dice.randint(10, 30))
        ]
        self._core = self._make_core(seed, folder)
        self._outputs: dict[str, list[int]] = {}
        self._reasons: dict[str, str] = {}
        self._clock = SystemClock()
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Serve everything, drain, check the invariants, and return the counts."""
        end_s = self._clock.now() + _STUCK_S
        requests = {
            f"r{n}": make_request(f"r{n}", *prompt, self._dice.randint(1, _MAX_TOKENS))
            for n, prompt in enumerate(self._wanted)
        }
        pending = list(requests.values())
        for turn in itertools.count():
            if pending and self._dice.random() < 0.5:
                self._core.add(pending.pop())
            self._disturb(requests, pending)
            self._turn()
            if turn % 16 == 0:
                self._core.check()
            if len(self._reasons) == len(requests):
                break
            if self._clock.now() > end_s:
                raise InvariantError(f"requests are stuck: {self._core.stats()}")
        self._core.drain(_DRAIN_S)
        self._account(requests)
        return self.counts

    def close(self) -> None:
        """Release model, threads and storage."""
        self._core.close()

    def _turn(self) -> None:
        if not self._core.has_work:
            sleep_s = self._core.sleep_s()
            self._core.completions.wait(min(0.01 if sleep_s is None else sleep_s, 0.01))
        for output in self._core.step():
            self._outputs.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                self._reasons[output.request_id] = output.finish_reason

    def _disturb(self, requests: Mapping[str, Request], pending: Sequence[Request]) -> None:
        if self._dice.random() < 0.005:
            self._core.reset_cache(self._dice.choice(RESETS))
            self.counts["resets"] += 1
        if self._dice.random() < 0.01:
            waiting = {request.request_id for request in pending}
            alive = [name for name in requests if name not in self._reasons.keys() | waiting]
            if alive:
                self._core.abort(RequestId(self._dice.choice(alive)))

    def _account(self, requests: Mapping[str, Request]) -> None:
        core, counts = self._core, self.counts
        core.check()
        stats, cache = core.stats(), core._cache.stats()
        if cache.leases or cache.jobs:
            raise InvariantError(f"kept after the end: {cache}")
        for pool in (cache.device, cache.host):
            if pool.free + pool.cached != pool.total:
                raise InvariantError(f"slots leaked: {pool}")
        for (family, length), (name, request) in zip(
            self._wanted, requests.items(), strict=True
        ):
            right = self._right.of(family, length)[: request.params.max_tokens]
            got = self._outputs.get(name, [])
            counts["wrong tokens"] += sum(a != b for a, b in zip(right, got, strict=False))
            if self._reasons[name] != "abort":
                counts["wrong tokens"] += abs(len(right) - len(got))
        counts["requests"] += len(requests)
        count_results(counts, stats, self._outputs, self._reasons)

    def _make_core(self, seed: int, folder: Path | None) -> EngineCore:
        """An engine whose pools hold a few requests, so that running ones are preempted."""
        dice = self._dice
        medium: dict[str, Any] = {"backend": "memory", "settings": {}}
        if folder is not None:
            settings = {"path": str(folder), "capacity_bytes": 4 << 20, "slab_bytes": 1 << 20}
            medium = {"backend": "file", "settings": settings | {"reserve_bytes": 0}}
        config = EngineConfig(
            model=str(self._right.folder),
            num_threads=1,
            block_tokens=_BLOCK_TOKENS,
            num_blocks_override=16 + dice.randint(0, 16),
            max_num_seqs=dice.choice((4, 8)),
            max_batched_tokens=dice.choice((64, 256)),
            swap_space_gib=dice.choice((8, 40)) * 65536 / (1 << 30),
            write_policy=dice.choice(
                ("write_through", "write_through_selective", "write_back")
            ),
            load_policy=dice.choice(("priced", "best_effort", "wait", "deadline")),
            load_timeout_s=0.2,
            storage_backend=f"{__name__}:ShakyStorage",
            storage_config=medium | {"seed": seed},
        )
        core, _ = build_core(config)
        mover = core._mover
        assert mover._copier is not None, "there is a host tier"
        mover._copier = ShakyCopier(mover._copier, Random(seed))
        return core


def make_request(name: str, family: int, num_tokens: int, max_tokens: int) -> Request:
    """A greedy request for up to `max_tokens` tokens. Prompts of one family have the same
    beginning."""
    tokens = np.random.default_rng(family).integers(5, 250, _LONGEST)[:num_tokens]
    params = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=RequestId(name),
        tokens=tokens.astype(np.int32),
        params=replace(params, max_tokens=max_tokens),
        arrival_s=0.0,
    )
