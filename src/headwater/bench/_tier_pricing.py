"""A grid of simulated scenarios: is a first token later in any of them because loads are
priced?

Each session has two requests. Between them its blocks leave the device, to the host or to a
file. The first token of the second request is measured with the load policies `priced`, `wait`
and `best_effort`, by the real scheduler and cache on a virtual clock. `priced` should be at
least as fast as the better of the other two, in each scenario.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from headwater.replay.cost import LinkCost, Machine
from headwater.replay.presets import preset
from headwater.replay.settings import SimConfig
from headwater.replay.simulator import Simulator
from headwater.replay.trace import TRACE_BLOCK, TraceRequest

POLICIES = ("priced", "wait", "best_effort")
_SESSIONS = 48
_NEW_BLOCKS = 1
"""Trace blocks that the second request of a session adds."""

_SEEDS = range(1, 9)
"""Several seeds, because in loaded cells `wait` lets about half of the requests wait long, and
then their median depends on the seed."""

_SLOW = {
    "device_to_host": 2e9,
    "host_to_device": 2e9,
    "host_to_storage": 0.5e9,
    "storage_to_host": 0.5e9,
}
"""Bytes per second of the slow links: pageable memory, a network disk."""

_PAUSE_S = 240.0
"""Time between the two requests of a session: long enough for all writes to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingScenario:
    """One cell of the grid."""

    tier: str
    prompt_tokens: int
    load: str
    link: str

    @property
    def name(self) -> str:
        return f"{self.tier}/{self.prompt_tokens}/{self.load}/{self.link}"


def scenarios(*, quick: bool) -> Iterator[PricingScenario]:
    """All combinations of tier, prompt length, load and link speed."""
    lengths = (2048,) if quick else (2048, 16384)
    for tier, tokens, load, link in product(
        ("device", "host", "file"), lengths, ("idle", "loaded"), ("fast", "slow")
    ):
        yield PricingScenario(tier=tier, prompt_tokens=tokens, load=load, link=link)


def measure_pricing(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Time to the first token (p50, p95) with `priced`, divided by that of the better of the
    other two policies, by scenario."""
    seeds = _SEEDS[:1] if quick else _SEEDS
    return compare_policies(
        "pricing",
        (
            (
                scenario.name,
                {policy: _first_tokens(scenario, policy, seeds) for policy in POLICIES},
            )
            for scenario in scenarios(quick=quick)
        ),
        say,
    )


def compare_policies(
    name: str,
    cells: Iterable[tuple[str, dict[str, dict[str, float]]]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The figures `{name}_ratio`, the worst of them, and the times to first token from which
    they are computed. Each of `cells` has a name, and milliseconds by policy and percentile."""
    ratios: dict[str, dict[str, float]] = {}
    first_ms: dict[str, dict[str, dict[str, float]]] = {}
    for cell, times in cells:
        first_ms[cell] = times
        ratios[cell] = {
            at: times["priced"][at] / min(times["wait"][at], times["best_effort"][at])
            for at in ("p50", "p95")
        }
        say(f"{name}: {cell} {ratios[cell]}")
    worst = {at: max(row[at] for row in ratios.values()) for at in ("p50", "p95")}
    return {
        f"{name}_ratio": ratios,
        f"{name}_ratio_worst": worst,
        f"{name}_first_token_ms": first_ms,
    }


def _first_tokens(
    scenario: PricingScenario, policy: str, seeds: Sequence[int]
) -> dict[str, float]:
    """Times to the first token of the second requests, for all seeds."""
    seconds: list[float] = []
    for seed in seeds:
        requests = _requests(scenario, seed)
        run = Simulator(_config(scenario, policy), requests).run()
        served = [one for instance in run.instances for one in instance.served]
        seconds += [one.ttft_s for one in served[_SESSIONS:]]
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return {"p50": 1e3 * p50, "p95": 1e3 * p95}


def _config(scenario: PricingScenario, policy: str) -> SimConfig:
    """A device and a host with the sizes of the scenario."""
    machine = _machine(scenario.link)
    session_gib = (
        (scenario.prompt_tokens + 2 * TRACE_BLOCK) * machine.kv_token_bytes / (1 << 30)
    )
    whole = 2 * _SESSIONS * session_gib
    small = 12 * session_gib
    device, host = {"device": (whole, 0.0), "host": (small, whole), "file": (small, small)}[
        scenario.tier
    ]
    return SimConfig(
        machine=machine,
        device_gib=device,
        host_gib=host,
        storage_gib=whole if scenario.tier == "file" else 0.0,
        load_policy=policy,
        max_num_seqs=8,
    )


def _machine(link: str) -> Machine:
    machine = preset("h200-8b")
    if link == "fast":
        return machine
    links: dict[str, LinkCost] = dict(machine.links)
    for name, bytes_s in _SLOW.items():
        links[name] = replace(links[name], bytes_s=bytes_s)
    return replace(machine, links=links)


def _requests(scenario: PricingScenario, seed: int) -> list[TraceRequest]:
    """All sessions once, a pause in which writes end, and all sessions again in another
    order."""
    rng = np.random.default_rng(seed)
    machine = preset("h200-8b")
    tokens = scenario.prompt_tokens
    compute_s = tokens * machine.step.token_s + tokens**2 / 2 * machine.step.pair_s
    # Low load: otherwise computing evicted prompts again would keep the device busy all the
    # time.
    pause_s = compute_s * (5.0 if scenario.load == "idle" else 1.0)
    blocks = tokens // TRACE_BLOCK
    made, now = [], 0.0
    order = [np.arange(_SESSIONS), rng.permutation(_SESSIONS)]
    for turn, sessions in enumerate(order):
        for session in sessions.tolist():
            first = 1 + session * (blocks + _NEW_BLOCKS)
            count = blocks + turn * _NEW_BLOCKS
            ids = list(range(first, first + count))
            made.append(TraceRequest(ids, count * TRACE_BLOCK, 16, now))
            slow = 2.0 if turn == 0 and scenario.tier == "file" else 1.0
            now += float(rng.exponential(pause_s)) * slow
        now += _PAUSE_S
    return made
