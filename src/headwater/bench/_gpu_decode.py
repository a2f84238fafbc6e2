"""Speed of decoding through the scheduler, as a share of the memory roofline, and speed of
copies at the same time."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine, GpuRun, weight_bytes
from headwater.bench._gpu_rooflines import kv_tokens_read
from headwater.cache import LoadJob, OffloadJob
from headwater.device.gpu.copier import CudaCopier
from headwater.device.model import LoadedModel
from headwater.transfer.mover import Mover
from headwater.transfer.slab import HostSlab
from headwater.types import JobId, Tier, Tokens

PROMPT = 976
OUTPUT = 96
"""Chosen so that the context is 1 k in the middle of the output."""

_SKIPPED = 4
"""Steps after the last prompt that are not counted."""

_JOB_BLOCKS = 32
_JOBS = 8
"""Maximum number of copies in flight. The loop starts copies only between steps, so they must
last for one step."""

_PACE_GB_S = 41.5
"""Rate of copies during decode: the figures are for this rate, not for a full link."""

_TAIL = 32
"""New tokens at the end of a prompt in each round; the others are cached."""


def measure_decode(
    model: LoadedModel, engine: GpuEngine, batches: list[int], ceiling_gb_s: float
) -> dict[str, Any]:
    """Tokens per second at each batch size, and the share of the memory roofline."""
    found = {}
    for batch in batches:
        served = serve_batch(engine, batch, seed=batch)
        steps = np.array(served.steps_s[_SKIPPED:])
        context = PROMPT + OUTPUT // 2
        tokens = batch * kv_tokens_read(model.module.config, context)
        num_bytes = weight_bytes(model) + tokens * model.token_bytes
        roofline_ms = num_bytes / ceiling_gb_s / 1e6
        mean_ms = float(steps.mean()) * 1e3
        found[str(batch)] = {
            "tokens_s": batch / mean_ms * 1e3,
            "step_ms": mean_ms,
            "step_p50_ms": float(np.percentile(steps, 50)) * 1e3,
            "step_p99_ms": float(np.percentile(steps, 99)) * 1e3,
            "roofline_ms": roofline_ms,
            "roofline_tokens_s": batch / roofline_ms * 1e3,
            "share": roofline_ms / mean_ms,
        }
    return found


def measure_copies(
    engine: GpuEngine, ceilings: dict[str, float], *, batch: int, rounds: int
) -> dict[str, Any]:
    """Rates of copies of whole blocks in each direction, alone and during decode; and the steps
    with and without copies."""
    result: dict[str, Any] = {}
    traffic, turn = Traffic(engine), 0
    prompts = _prompts(engine, batch, seed=7_000)
    engine.runner.warm(batch)
    engine.serve(prompts, max_tokens=2)
    for name, kind in (("device_to_host", OffloadJob), ("host_to_device", LoadJob)):
        ceiling = ceilings[f"{name}_gb_s"]
        rate = traffic.rate_alone(kind)
        plain: list[GpuRun] = []
        beside: list[GpuRun] = []
        rates = []
        for _ in range(rounds):
            turn += 1
            plain.append(_serve_again(engine, prompts, turn))
            turn += 1
            traffic.begin(kind)
            beside.append(_serve_again(engine, prompts, turn, traffic.keep_going))
            rates.append(traffic.end())
        result[name] = {
            "gb_s": rate,
            "ceiling_gb_s": ceiling,
            "share": rate / ceiling,
            "gb_s_under_decode": float(np.mean(rates)),
            **_compared(plain, beside, lambda served: served.steps_s),
            "on_device": _compared(plain, beside, lambda served: served.device_steps_s),
        }
    result["batch"] = batch
    traffic.close()
    return result


class Traffic:
    """Endless copies over some slots of the pool, as jobs of the engine's own copier."""

    def __init__(self, engine: GpuEngine) -> None:
        self._engine = engine
        count = _JOBS * _JOB_BLOCKS
        slots = engine.cache.take(count, now=engine.clock.now())
        assert slots is not None, "the pool is too small for traffic"
        self._slots = slots
        self._slab = HostSlab(count, engine.block_bytes)
        self._mover = Mover(CudaCopier(engine.runner.pool, self._slab, engine.clock))
        self._job = 0
        self._kind: Any = OffloadJob
        self._done = self._started = 0
        self._began_s = 0.0

    def rate_alone(self, kind: Any) -> float:  # noqa: ANN401 -- a class of plans
        """GB per second with nothing else on the device."""
        for jobs in (6, 60):
            self.begin(kind)
            while self._done < jobs:
                self._mover.completions.wait(10)
                self.keep_going(pace_gb_s=1e3)
            rate = self.end()
        return rate

    def begin(self, kind: Any) -> None:  # noqa: ANN401
        """Start copying."""
        self._kind, self._done, self._started = kind, 0, 0
        self._began_s = self._engine.clock.now()
        self.keep_going()

    def keep_going(self, pace_gb_s: float = _PACE_GB_S) -> None:
        """Start the copies that have become due, within the limit of jobs in flight."""
        self._done += len(self._mover.take(now=0.0))
        seconds = self._engine.clock.now() - self._began_s
        job_gb = _JOB_BLOCKS * self._engine.block_bytes / 1e9
        due = int(pace_gb_s * seconds / job_gb) + 1 - self._started
        for _ in range(min(due, _JOBS - self._mover.num_in_flight)):
            self._start()

    def end(self) -> float:
        """Stop, and return the rate from the call of `begin` to the end of the last copy."""
        while self._mover.num_in_flight:
            self._mover.completions.wait(10)
            self._done += len(self._mover.take(now=0.0))
        seconds = self._engine.clock.now() - self._began_s
        return self._done * _JOB_BLOCKS * self._engine.block_bytes / seconds / 1e9

    def close(self) -> None:
        """Give the slots back."""
        self._mover.close()
        self._engine.cache.free(self._slots)

    def _start(self) -> None:
        self._job += 1
        self._started += 1
        part = self._job % _JOBS
        mine = slice(part * _JOB_BLOCKS, (part + 1) * _JOB_BLOCKS)
        device, host = self._slots[mine], np.arange(len(self._slots))[mine]
        up = self._kind is LoadJob
        plan = self._kind(
            job=JobId(self._job),
            source=Tier.HOST if up else Tier.DEVICE,
            target=Tier.DEVICE if up else Tier.HOST,
            source_slots=host if up else device,
            target_slots=device if up else host,
        )
        self._mover.start([plan], now=0.0)


def serve_batch(
    engine: GpuEngine, batch: int, *, seed: int, max_tokens: int = OUTPUT
) -> GpuRun:
    """Serve `batch` requests with a context of about 1 k, all at once."""
    engine.runner.warm(batch)
    return engine.serve(_prompts(engine, batch, seed=seed), max_tokens=max_tokens)


def _serve_again(
    engine: GpuEngine,
    prompts: list[Tokens],
    turn: int,
    between: Callable[[], None] | None = None,
) -> GpuRun:
    """Serve prompts that are cached except for their ends, so that nearly everything is
    decoding."""
    again = []
    for row, prompt in enumerate(prompts):
        tail = engine.prompt(_TAIL, seed=turn * 1_000_000 + row)
        again.append(np.concatenate((prompt[:-_TAIL], tail)))
    return engine.serve(again, max_tokens=OUTPUT, between=between)


def _prompts(engine: GpuEngine, batch: int, *, seed: int) -> list[Tokens]:
    # Lengths differ by up to a block, because sequences rarely all fill a block in the same
    # step.
    lengths = [PROMPT + row * 37 % BLOCK_TOKENS - BLOCK_TOKENS // 2 for row in range(batch)]
    return [engine.prompt(n, seed * 1_000 + row) for row, n in enumerate(lengths)]


def _compared(
    plain: list[GpuRun], beside: list[GpuRun], steps: Callable[[GpuRun], list[float]]
) -> dict[str, float]:
    """Median and 99th percentile of steps without and with copies, and their ratios."""
    found = {}
    for which in (50, 99):
        without, with_copies = (
            float(
                np.percentile([s for served in rounds for s in steps(served)[_SKIPPED:]], which)
            )
            for rounds in (plain, beside)
        )
        found[f"step_p{which}_ms"] = without * 1e3
        found[f"step_p{which}_ms_with_copies"] = with_copies * 1e3
        found[f"p{which}_ratio"] = with_copies / without
    return found


def blocks_for(batch: int) -> int:
    """Device blocks for `batch` prompts and for the copies."""
    each = -(-(PROMPT + OUTPUT + BLOCK_TOKENS // 2) // BLOCK_TOKENS) + 1
    return batch * each + _JOBS * _JOB_BLOCKS + 64
