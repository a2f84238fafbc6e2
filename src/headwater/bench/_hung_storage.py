"""Times to the first token of an engine whose storage never answers, compared with an engine
without storage.

A cell is a backend and a call: the medium of the backend is stopped just before the first call
of that kind (in memory: the call itself waits). Requests are served until none of them waits
for a timeout any more, because the breaker is open. From then on both engines serve the same
prompts in turns, half of them stored before the stop. A second engine without storage shows
the noise of the machine. At the end the medium continues, and every slot must become free again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headwater.bench._stopped_media import StoppableMedium, open_medium
from headwater.bench._tier_engine import TierEngine
from headwater.clock import SystemClock
from headwater.errors import InvariantError
from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.forwarding import ForwardingStorage
from headwater.types import Tokens

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

CALLS = ("contains", "read", "write", "remove", "open", "close")
_BACKEND = "headwater.bench._hung_storage:HungStorage"
_TIMEOUT_S = 0.5
"""Deadline of every storage call after the stop; only shortens the time until a breaker
opens."""

_WRITE_S = 0.05
"""Time for the writes of one request to reach storage."""

_SETTLE_S = 60.0
_SETTLED = 12
"""Requests in a row without a timeout after which the breakers count as open."""

_NUM_STORED = 8
_STORED_SEED, _FRESH_SEED = 400_000, 600_000


class HungStorage(ForwardingStorage):
    """Passes calls on to a real backend; stops its medium before calls that are in `hung`."""

    def __init__(
        self, backend: StorageBackend, medium: StoppableMedium, hung: list[str], made: Event
    ) -> None:
        super().__init__(backend)
        self._medium = medium
        self._hung = hung
        self._made = made

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        """Settings: `medium`; the list `hung`, which its owner may change; and the event
        `made`, which is set at the first call that the list names."""
        medium: StoppableMedium = settings["medium"]
        if "open" in settings["hung"]:
            medium.hang()
        backend = open_storage(medium.backend, medium.config, opening)
        return cls(backend, medium, settings["hung"], settings["made"])

    def close(self) -> None:
        self._stop("close")
        super().close()

    def _target(self, call: str) -> StorageBackend:
        self._stop(call)
        return self._backend

    def _stop(self, call: str) -> None:
        if call in self._hung:
            self._made.set()
            self._medium.stop()
            self._medium.hang()


@dataclass(frozen=True, kw_only=True)
class HungWorkload:
    """The workload of every cell."""

    model: "LoadedModel"
    settings: Mapping[str, Any]
    num_prompts: int
    num_tokens: int


def measure_hung(
    work: HungWorkload,
    folder: Path,
    *,
    backends: Sequence[str],
    calls: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """`hung_ttft_ratio`: p50 and p99 of the time to the first token, divided by those of an engine
    without storage; `control` is a second engine without storage. `hung_lost_slots` counts slots that
    did not come back, `hung_close_s` the seconds that closing an engine took."""
    plain = TierEngine(work.model, **work.settings)
    control = TierEngine(work.model, **work.settings)
    say("hung: control")
    ratios: dict[str, Any] = {"control": _compare(work, plain, control)}
    control.close()
    lost: dict[str, int] = {}
    close_s: dict[str, float] = {}
    breakers: dict[str, str] = {}
    for backend in backends:
        for call in calls:
            name = f"{backend} {call}"
            path = folder / name.replace(" ", "-")
            path.mkdir()
            with open_medium(backend, path) as medium:
                if medium is None:
                    say(f"hung: {name} left out, its server is not installed")
                    continue
                say(f"hung: {name}, until no request waits for a timeout")
                cell = _Cell(work, medium, call)
                if call == "close":
                    close_s[name] = cell.close_s()
                    continue
                breakers[name] = cell.settle()
                ratios[name] = _compare(work, plain, cell.engine)
                lost[name] = cell.num_lost()
    plain.close()
    return {
        "hung_ttft_ratio": ratios,
        "hung_breakers": breakers,
        "hung_lost_slots": lost,
        "hung_close_s": close_s,
    }


class _Cell:
    """An engine on a medium that stops at one kind of call."""

    def __init__(self, work: HungWorkload, medium: StoppableMedium, call: str) -> None:
        self._work = work
        self._medium = medium
        self._call = call
        self._hung: list[str] = ["open"] if call == "open" else []
        self._made = Event()
        """Whether the call that hangs was made at all."""
        backend = _BACKEND
        config = {"medium": medium, "hung": self._hung, "made": self._made}
        if call == "open":
            medium.stop()
            if medium.backend != "memory":
                backend, config = medium.backend, medium.config
        self.engine = TierEngine(
            work.model,
            **work.settings,
            storage_backend=backend,
            storage_config=config,
            write_policy="write_through",
            load_policy="wait",
        )

    def settle(self) -> str:
        """Let the calls hang, and serve until no request waits for a timeout; return the
        breakers' states."""
        engine = self.engine
        if self._call != "open":
            for prompt in _stored(self._work, engine):
                engine.serve([prompt], max_tokens=1)
            engine.drain()
            engine.core.reset_cache()
        engine.limit_storage_calls(_TIMEOUT_S)
        self._hung.append(self._call)
        if self._call == "remove":
            engine.core.reset_cache(("device", "host", "storage"))
        clock = SystemClock()
        end_s, number, calm = clock.now() + _SETTLE_S, 0, 0
        calm_s = clock.now()
        prompts = _stored(self._work, engine)
        while calm < _SETTLED or clock.now() - calm_s < 2 * _TIMEOUT_S:
            if clock.now() > end_s:
                raise InvariantError(
                    f"{self._call} never returns, and requests still wait for it"
                )
            before = _num_timeouts(engine)
            fresh = engine.make_prompt(self._work.num_tokens, seed=_FRESH_SEED + number)
            engine.serve([fresh if number % 2 else prompts[number // 2 % 8]], max_tokens=1)
            engine.core.drain(_WRITE_S)  # a reset would cancel writes that have not begun
            engine.core.reset_cache()
            calm += 1
            if _num_timeouts(engine) != before or not self._is_stopped:
                calm, calm_s = 0, clock.now()
            number += 1
        stats = engine.core.stats().storage
        assert stats is not None, "the engine has storage"
        return f"{stats.breaker} / {stats.write_breaker}"

    @property
    def _is_stopped(self) -> bool:
        """Whether the call that never returns was made. Without it the cell would show nothing."""
        return self._call == "open" or self._made.is_set()

    def num_lost(self) -> int:
        """Slots that are still missing after every hung call has returned."""
        self._medium.go_on()
        self._hung.clear()
        self.engine.drain()
        self.engine.core.check()
        tiers = self.engine.core.stats().tiers
        lost = sum(
            tier.num_blocks - tier.free - tier.cached
            for name, tier in tiers.items()
            if name in ("device", "host")
        )
        self.engine.close()
        return lost

    def close_s(self) -> float:
        """Seconds to close the engine, whose storage stopped while it served."""
        for prompt in _stored(self._work, self.engine):
            self.engine.serve([prompt], max_tokens=1)
        self._hung.append("close")
        self._medium.stop()
        clock = SystemClock()
        began_s = clock.now()
        self.engine.core.close()
        return clock.now() - began_s


def _num_timeouts(engine: TierEngine) -> int:
    stats = engine.core.stats()
    storage = stats.storage
    hung = 0 if storage is None else storage.reasons.get("hung", 0)
    return hung + sum(link.failures.get("timeout", 0) for link in stats.links.values())


def _stored(work: HungWorkload, engine: TierEngine) -> list[Tokens]:
    return [
        engine.make_prompt(work.num_tokens, seed=_STORED_SEED + number)
        for number in range(_NUM_STORED)
    ]


def _compare(work: HungWorkload, plain: TierEngine, other: TierEngine) -> dict[str, float]:
    """Times to the first token (p50, p99) of `other`, divided by those of `plain`; the two serve
    alternately."""
    firsts: dict[TierEngine, list[float]] = {plain: [], other: []}
    stored = _stored(work, plain)
    for number in range(work.num_prompts + 2):
        fresh = plain.make_prompt(work.num_tokens, seed=500_000 + number)
        prompt = fresh if number % 2 else stored[number // 2 % _NUM_STORED]
        for engine in (plain, other) if number % 4 < 2 else (other, plain):
            engine.core.reset_cache()
            firsts[engine].append(engine.serve([prompt], max_tokens=1).first_s)
            engine.core.drain(_WRITE_S)
    return {
        f"p{q}": float(
            np.percentile(firsts[other][2:], q) / np.percentile(firsts[plain][2:], q)
        )
        for q in (50, 99)
    }
