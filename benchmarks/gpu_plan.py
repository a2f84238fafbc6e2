"""What `scripts/gpu` runs: its parts, their order, and which of them fit into the time left.

The times are about those of one H200. A part is stopped at its limit, or earlier if the call has
less time left.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPart:
    """Tests or one part of `headwater bench gpu`, run by a process of its own."""

    name: str
    needs_s: int
    """It is started only if at least this much time is left."""

    limit_s: int
    tests: tuple[str, ...] = ()
    """Test files in tests/device; without them it is a part of `headwater bench gpu`."""

    workers: int = 1
    """Processes that run its tests side by side, where pytest-xdist is installed."""

    after: str | None = None
    """A part that prepares files for this one."""


def _tests(name: str, needs_s: int, *files: str, workers: int = 1) -> GpuPart:
    return GpuPart(
        name=f"tests-{name}",
        needs_s=needs_s,
        limit_s=3 * needs_s,
        tests=tuple(f"test_gpu_{file}.py" for file in files),
        workers=workers,
    )


def _bench(name: str, needs_s: int, *, after: str | None = None) -> GpuPart:
    return GpuPart(name=name, needs_s=needs_s, limit_s=3 * needs_s, after=after)


PARTS = (
    # Tests of kernels mostly wait for the compiler, so several processes are several times as fast.
    _tests(
        "kernels",
        120,
        "kernels",
        "kernels_bench",
        "steps_bench",
        "sampling_kernels",
        "heads",
        "pairs",
        "early",
        "work",
        workers=6,
    ),
    _tests(
        "models",
        120,
        "latent",
        "latent_prompt",
        "quantized",
        "fp8_blocks",
        "fp8_experts",
        "mx_experts",
        "expert_choice",
        workers=4,
    ),
    _tests("families", 80, "families", workers=8),
    _tests("steps", 100, "runner", "engine", "sampling", "ready", "ranks", workers=2),
    _tests(
        "copies", 60, "copier", "layerwise", "pinned", "slots", "cuda_link", "peers", workers=2
    ),
    # Parts with targets that were missed when they were last measured come first.
    _bench("json", 60),
    _bench("quant", 150),
    _bench("mxfp4", 80),
    _bench("fp8moe", 150),
    _bench("fp8mla", 60),
    _bench("sampling", 120),
    _bench("streams", 80),
    _bench("model_files", 40),
    _bench("http", 130, after="model_files"),
    _bench("mixed", 150, after="model_files"),
    _bench("first_wave", 150, after="model_files"),
    _bench("sessions", 240, after="model_files"),
    _bench("mla", 90),
    _bench("families", 120),
    _bench("fp8kv", 100),
    _bench("handoff", 120),
    _bench("first_token", 70),
    _bench("kernels", 40),
    # Parts whose targets were reached.
    _bench("moe", 150),
    _bench("copies", 100),
    _bench("prefill", 50),
    _bench("decode", 150),
    _bench("all_miss", 150),
    _bench("start", 60),
    _bench("trace", 90),
)


def chosen_parts(names: Sequence[str]) -> list[GpuPart]:
    """The named parts in the given order, or all parts in the order of `PARTS`. `tests`
    stands for all tests. A part that prepares files comes before the first one that needs them."""
    known = {part.name: part for part in PARTS}
    groups = {"tests": [part.name for part in PARTS if part.tests]}
    chosen: list[GpuPart] = []
    for name in names or known:
        for each in groups.get(name, [name]):
            if each not in known:
                raise ValueError(f"no part {each!r}; known: tests, {', '.join(known)}")
            for part in (known.get(known[each].after or ""), known[each]):
                if part is not None and part not in chosen:
                    chosen.append(part)
    return chosen


def next_part(
    parts: Sequence[GpuPart], ended: Collection[str], left_s: float
) -> GpuPart | None:
    """The first part that has not ended, fits into the time left, and has its files."""
    waiting = [part for part in parts if part.name not in ended]
    names = {part.name for part in waiting}
    for part in waiting:
        if part.needs_s <= left_s and part.after not in names:
            return part
    return None
