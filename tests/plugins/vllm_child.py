"""Runs a whole vLLM on CPU, with or without the connector, and reports what it generated.

`serve` runs in a process of its own. It sends one message per round of prompts: tokens, cached tokens,
seconds, seconds to the first token, seconds of the longest step. Importing this module imports vLLM, so a fork server that has it
starts each of these processes in a moment.
"""

import os
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams


def serve(model: str, job: dict[str, Any], pipe: Connection) -> None:
    """Work on `job`; the test reads from the other end of `pipe`."""

    def say(**fields: Any) -> None:
        pipe.send(fields)

    transfer = None
    if job.get("connector") is not None:
        transfer = {
            "kv_connector": "HeadwaterConnector",
            "kv_connector_module_path": "headwater.plugins.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": job["connector"],
        }
    llm = LLM(
        model,
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=job.get("max_model_len", 1024),
        num_gpu_blocks_override=job.get("num_blocks"),
        kv_transfer_config=transfer,
        disable_log_stats=False,
        seed=0,
    )
    steps = _time_steps(llm)
    say(ready=True)
    for round_number in range(job.get("rounds", 1)):
        for line in job["batches"]:
            if round_number and (job.get("reset") or job.get("reset_connector")):
                llm.reset_prefix_cache(reset_connector=bool(job.get("reset_connector")))
            sampling = SamplingParams(
                temperature=0,
                max_tokens=job.get("max_tokens", 8),
                ignore_eos=True,
                detokenize=False,
            )
            steps.clear()
            began = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": p} for p in line], sampling, use_tqdm=False
            )
            took = time.perf_counter() - began
            say(
                tokens=[list(output.outputs[0].token_ids) for output in outputs],
                cached=[output.num_cached_tokens for output in outputs],
                seconds=took,
                ttft=[_first_token_s(output) for output in outputs],
                longest_step_s=max(steps),
            )
        if job.get("pause_s"):
            time.sleep(job["pause_s"])
    if job.get("drain_s"):
        _drain(llm, job["drain_s"])
        say(drained=True)
    say(metrics=[metric.name for metric in REGISTRY.collect() if metric.samples])
    if job.get("hold"):
        pipe.recv()


def _time_steps(llm: LLM) -> list[float]:
    """A list that receives the seconds of every step from now on."""
    engine = llm.llm_engine.engine_core.engine_core
    step, seconds = engine.step_fn, []

    def timed_step() -> Any:
        began = time.perf_counter()
        try:
            return step()
        finally:
            seconds.append(time.perf_counter() - began)

    engine.step_fn = timed_step
    return seconds


def _first_token_s(output: object) -> float | None:
    metrics = getattr(output, "metrics", None)
    return None if metrics is None else metrics.first_token_latency


def _drain(llm: LLM, limit_s: float) -> None:
    """Step until all waiting writes are stored."""
    engine = llm.llm_engine.engine_core.engine_core
    connector = engine.scheduler.connector
    deadline = time.monotonic() + limit_s
    while connector.has_pending_push_work() and time.monotonic() < deadline:
        engine.step_fn()
