"""Lower tiers under the real engine: what they give back, compared with an uncached run."""

from pathlib import Path
from typing import Any

from headwater.config import EngineConfig
from headwater.launch.core import build_core
from tests.disagg.real import make_real_request


def check_lower_tiers(folder: Path, prompts: list[Any], **settings: Any) -> None:
    """Prompts found on the host and, after a restart, in files give the tokens of an uncached
    run. The device is small, so sequences are preempted and evicted."""
    settings |= {
        "num_blocks_override": 16,
        "block_tokens": 16,
        "num_threads": 1,
        "max_batched_tokens": 64,
        "swap_space_gib": 0.05,
        "write_policy": "write_through",
        "storage_backend": "file",
        "storage_config": {"path": str(folder), "capacity_bytes": 64 << 20},
        "load_policy": "wait",
    }
    expected, _ = _run(settings | {"prefix_caching": False}, prompts)

    first, sources = _run(settings, [*prompts, *prompts])
    restarted, later = _run(settings, prompts)

    assert first == expected + expected
    assert restarted == expected
    assert sources["host"] > 0
    assert later["storage"] > 0


def _run(
    settings: dict[str, Any], prompts: list[Any]
) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each prompt, one after another, and where cached ones came from."""
    engine, _ = build_core(EngineConfig(**settings))
    out: list[list[int]] = []
    sources = {"host": 0, "storage": 0}
    for number, tokens in enumerate(prompts):
        engine.add(make_real_request(str(number), tokens.tolist(), seed=1))
        generated: list[int] = []
        while True:
            if not engine.has_work:
                engine.completions.wait(0.001)
            done = False
            for output in engine.step():
                generated += output.tokens
                if output.usage is not None:
                    for tier in sources:
                        sources[tier] += output.usage.by_tier.get(tier, 0)
                done |= output.finish_reason is not None
            if done:
                break
        out.append(generated)
        while engine.has_work:  # writes to lower tiers
            engine.step()
    engine.close()
    return out, sources
