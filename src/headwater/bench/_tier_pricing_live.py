"""The grid of load policies on the built-in model: first tokens in real time.

Sessions are computed, written to lower tiers and evicted from the upper ones; then all return.
Three engines with the same weights, one for each load policy, serve each cell in turn. `slow`
storage is the file backend behind a limit of bytes per second.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from threading import Event
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headwater.bench._tier_engine import TierEngine
from headwater.bench._tier_pricing import POLICIES, PricingScenario, compare_policies
from headwater.storage import Opening, StorageBackend, open_storage
from headwater.storage.base import BlockRead
from headwater.storage.forwarding import ForwardingStorage
from headwater.transfer.slab import slot_bytes
from headwater.types import BlockKey, Tokens

if TYPE_CHECKING:
    from headwater.device.model import LoadedModel

_SESSIONS = 12
_ADDED = 32
_BLOCK_TOKENS = 16
_LENGTHS = (256, 768)
_CLIENTS = {"idle": 1, "loaded": 6}
_SLOW_BYTES_S = 2e6
"""A tenth or less of the speed at which the built-in model computes KV."""

_WARM_ROUNDS = 1
"""Rounds before the measured ones, in which the engines measure speeds."""


class SlowStorage(ForwardingStorage):
    """A backend whose reads and writes take at least the time of a slow medium."""

    def __init__(self, backend: StorageBackend, bytes_s: float) -> None:
        super().__init__(backend)
        self._bytes_s = bytes_s
        self._closed = Event()

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        """Settings are those of the file backend, and `bytes_s`."""
        inner = {name: value for name, value in settings.items() if name != "bytes_s"}
        return cls(open_storage("file", inner, opening), settings["bytes_s"])

    def read(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, timeout_s: float
    ) -> list[BlockRead]:
        self._closed.wait(sum(view.nbytes for view in into) / self._bytes_s)
        return super().read(keys, into, timeout_s=timeout_s)

    def close(self) -> None:
        self._closed.set()
        super().close()


def live_scenarios() -> dict[str, PricingScenario]:
    """All combinations of tier, prompt length and load; storage also on a slow link."""
    tiers = (("device", "fast"), ("host", "fast"), ("file", "fast"), ("file", "slow"))
    made = (
        PricingScenario(tier=tier, prompt_tokens=tokens, load=load, link=link)
        for (tier, link), tokens, load in product(tiers, _LENGTHS, _CLIENTS)
    )
    return {scenario.name: scenario for scenario in made}


def measure_live_pricing(
    model: "LoadedModel",
    settings: Mapping[str, Any],
    folder: Path,
    *,
    scenarios: Sequence[PricingScenario],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time to the first token (p50, p95) with `priced`, divided by that of the better of the
    other two policies; medians of rounds."""
    return compare_policies(
        "live_pricing",
        (
            (
                scenario.name,
                _measure_cell(
                    scenario, model, settings, folder / scenario.name.replace("/", "-"), rounds
                ),
            )
            for scenario in scenarios
        ),
        say,
    )


def _measure_cell(
    scenario: PricingScenario,
    model: "LoadedModel",
    settings: Mapping[str, Any],
    folder: Path,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """p50 and p95 in milliseconds for each policy, as medians of the rounds."""
    engines = {
        policy: _engine(scenario, model, settings, folder / policy, policy)
        for policy in POLICIES
    }
    seen: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for number in range(rounds + _WARM_ROUNDS):
        for policy in POLICIES if number % 2 else reversed(POLICIES):
            first_s = _serve_round(scenario, engines[policy], seed=1000 * number)
            if number >= _WARM_ROUNDS:
                p50, p95 = np.percentile(first_s, (50, 95)).tolist()
                seen[policy].append((1e3 * p50, 1e3 * p95))
    for engine in engines.values():
        engine.close()
    return {
        policy: {"p50": median(p50 for p50, _ in rows), "p95": median(p95 for _, p95 in rows)}
        for policy, rows in seen.items()
    }


def _engine(
    scenario: PricingScenario,
    model: "LoadedModel",
    settings: Mapping[str, Any],
    folder: Path,
    policy: str,
) -> TierEngine:
    """An engine whose tiers hold all sessions."""
    per_session = -(-(scenario.prompt_tokens + _ADDED + 16) // _BLOCK_TOKENS)
    num_blocks = 2 * _SESSIONS * per_session
    block_bytes = slot_bytes(model.token_bytes * _BLOCK_TOKENS)
    tiers: dict[str, Any] = {"swap_space_gib": 0.0}
    if scenario.tier != "device":
        tiers = {"swap_space_gib": num_blocks * block_bytes / (1 << 30)}
    if scenario.tier == "file":
        tiers |= _storage(scenario.link, folder)
    return TierEngine(
        model,
        **settings,
        **tiers,
        num_blocks_override=num_blocks,
        block_tokens=_BLOCK_TOKENS,
        num_threads=1,
        load_policy=policy,
    )


def _storage(link: str, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "path": str(folder),
        "capacity_bytes": 1 << 30,
        "reserve_bytes": 0,
    }
    if link == "fast":
        return {"storage_backend": "file", "storage_config": config}
    return {
        "storage_backend": f"{__name__}:SlowStorage",
        "storage_config": config | {"bytes_s": _SLOW_BYTES_S},
    }


def _serve_round(scenario: PricingScenario, engine: TierEngine, *, seed: int) -> list[float]:
    """Seconds to the first token of each session that returns. The round begins with empty
    memory: a full host would lose blocks that are evicted from the device all at once."""
    engine.core.reset_cache()
    prompts = [
        engine.make_prompt(scenario.prompt_tokens, seed=seed + n) for n in range(_SESSIONS)
    ]
    engine.serve(prompts, max_tokens=1)
    engine.drain()
    if scenario.tier == "host":
        engine.clear_device()
    elif scenario.tier == "file":
        engine.core.reset_cache()
    longer = [
        _joined(prompt, engine.make_prompt(_ADDED, seed=seed + 500 + n))
        for n, prompt in enumerate(prompts)
    ]
    order = np.random.default_rng(seed).permutation(_SESSIONS).tolist()
    first_s = engine.first_tokens(
        [longer[n] for n in order], clients=_CLIENTS[scenario.load], max_tokens=8
    )
    engine.drain()
    return first_s


def _joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)
