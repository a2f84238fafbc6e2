"""First tokens of an engine whose storage never answers, beside an engine without storage.

One kind of call never returns. Requests are served until the breaker of that kind has opened;
from then on both engines serve prompts of one length in turns. A third engine, without storage
like the first, shows what the machine cannot tell apart.
"""

from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headwater.bench._tier_engine import TierEngine
from headwater.clock import SystemClock
from headwater.errors import InvariantError, StorageError
from headwater.storage import Opening
from headwater.storage.base import BlockRead, BlockWrite
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.types import BlockKey

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

CALLS = ("contains", "read", "write")
_BACKEND = "headwater.bench._hung_storage:HungStorage"
_OPEN_S = 240.0
"""Longest wait for the breaker: three writes hang for a minute each, two at a time."""


class HungStorage(MemoryStorage):
    """Blocks in memory; calls that are named in the list `hung` wait for the event `released`."""

    def __init__(self, opening: Opening, hung: list[str], released: Event) -> None:
        super().__init__(MemoryConfig(), opening.format)
        self._hung = hung
        self._released = released

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        return cls(opening, settings["hung"], settings["released"])

    def contains(self, runs: Sequence[Sequence[BlockKey]], *, timeout_s: float) -> list[int]:
        self._hang("contains")
        return super().contains(runs, timeout_s=timeout_s)

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._hang("read")
        return super().read(keys, into, timeout_s=timeout_s)

    def write(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[memoryview],
        *,
        parents: Sequence[BlockKey],
        timeout_s: float,
    ) -> list[BlockWrite]:
        self._hang("write")
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def _hang(self, call: str) -> None:
        if call in self._hung:
            self._released.wait()
            raise StorageError(f"{call} was released")


def measure_hung(
    model: "LoadedModel",
    settings: Mapping[str, Any],
    *,
    calls: Sequence[str],
    prompts: int,
    num_tokens: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`hung_ttft_ratio`: p50 and p99 of the first token over those of an engine without storage,
    by the call that hangs, and those of a second engine without storage as `control`."""
    plain = TierEngine(model, **settings)
    ratios: dict[str, Any] = {}
    control = TierEngine(model, **settings)
    ratios["control"] = _compare(plain, control, prompts, num_tokens)
    control.close()
    lost: dict[str, int] = {}
    for call in calls:
        say(f"hung: {call}, until the breaker opens")
        hung: list[str] = []
        released = Event()
        config = {"hung": hung, "released": released}
        engine = TierEngine(
            model,
            **settings,
            storage_backend=_BACKEND,
            storage_config=config,
            write_policy="write_through",
        )
        _open_breaker(engine, call, hung, num_tokens)
        ratios[call] = _compare(plain, engine, prompts, num_tokens)
        lost[call] = _num_lost(engine, released)
    plain.close()
    return {"hung_ttft_ratio": ratios, "hung_lost_slots": lost}


def _compare(
    plain: TierEngine, other: TierEngine, prompts: int, num_tokens: int
) -> dict[str, float]:
    firsts: dict[TierEngine, list[float]] = {plain: [], other: []}
    for number in range(prompts + 2):
        order = (plain, other) if number % 2 else (other, plain)
        for engine in order:
            prompt = engine.make_prompt(num_tokens, seed=500_000 + number)
            firsts[engine].append(engine.serve([prompt], max_tokens=1).first_s)
    return {
        f"p{q}": float(
            np.percentile(firsts[other][2:], q) / np.percentile(firsts[plain][2:], q)
        )
        for q in (50, 99)
    }


def _open_breaker(engine: TierEngine, call: str, hung: list[str], num_tokens: int) -> None:
    """Serve until the breaker of `call` is open."""
    stored = [engine.make_prompt(num_tokens, seed=400_000 + number) for number in range(8)]
    for prompt in stored:
        engine.serve([prompt], max_tokens=1)
    engine.drain()
    engine.core.reset_cache()
    hung.append(call)
    clock = SystemClock()
    end_s, number = clock.now() + _OPEN_S, 0
    while True:
        stats = engine.core.stats().storage
        if stats is None or clock.now() > end_s:
            raise InvariantError(f"the breaker did not open though {call} never returns")
        if (stats.write_breaker if call == "write" else stats.breaker) == "open":
            return
        fresh = engine.make_prompt(num_tokens, seed=600_000 + number)
        engine.serve([stored[number % 8] if call == "read" else fresh], max_tokens=1)
        engine.core.reset_cache()
        number += 1


def _num_lost(engine: TierEngine, released: Event) -> int:
    """Slots that did not come back after every hung call has returned."""
    released.set()
    engine.drain()
    engine.core.check()
    tiers = engine.core.stats().tiers
    lost = sum(
        tier.num_blocks - tier.free - tier.cached
        for name, tier in tiers.items()
        if name in ("device", "host")
    )
    engine.close()
    return lost
