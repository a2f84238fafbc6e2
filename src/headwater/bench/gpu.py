"""`headwater bench gpu`: the GPU path, compared with the limits of the machine and with
transformers.

Needs an NVIDIA GPU, torch, Triton, transformers and cuda-python, and no library of the
server for the parts that run in this process. `http`, `first_wave`, `mixed` and `sessions` start
servers and clients on this machine; with `--device cpu` these run on the built-in model, as a
test of the benchmark. Models are random weights with real shapes.
"""

import json
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from headwater.bench._flags import read_flags
from headwater.bench._gpu_files import ending_on_sigterm, write_part
from headwater.bench._gpu_parts import GpuParts
from headwater.bench._report import print_report
from headwater.clock import SystemClock
from headwater.errors import ConfigError

PARTS = (
    "copies",
    "handoff",
    "decode",
    "prefill",
    "first_token",
    "start",
    "all_miss",
    "trace",
    "sampling",
    "moe",
    "mla",
    "families",
    "streams",
    "json",
    "model_files",
    "http",
    "mixed",
    "first_wave",
    "sessions",
    "quant",
    "mxfp4",
    "fp8moe",
    "fp8kv",
    "fp8mla",
    "kernels",
)
SERVER_PARTS = ("http", "mixed", "first_wave", "sessions")
"""Parts that measure `headwater serve` from outside, on any device."""


def main(argv: Sequence[str]) -> int:
    """Run the chosen parts and print a table or JSON."""
    options = read_flags(_parser(), argv)
    chosen = options.parts.split(",")
    for part in chosen:
        if part not in PARTS:
            raise ConfigError(f"no part {part!r}; known: {', '.join(PARTS)}")
    if options.device == "cuda":
        _require_gpu(chosen)
    parts = GpuParts(options)
    with ending_on_sigterm(), parts.closing:
        for part in chosen:
            _attempt(parts, part, options)
    print_report("headwater bench gpu", parts.result, as_json=options.json)
    return 1 if parts.result["failed"] else 0


def _require_gpu(chosen: Sequence[str]) -> None:
    """Raise ConfigError, with the parts that are skipped, unless there is a GPU and all that a
    part needs."""
    skipped = f"skipped: {', '.join(chosen)}"
    try:
        from headwater.bench._gpu_engine import require_gpu
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"this benchmark needs the package {exc.name!r}, and a GPU; {skipped}"
        ) from exc
    try:
        require_gpu()
    except ConfigError as exc:
        raise ConfigError(f"{exc}; {skipped}") from exc


def _attempt(parts: GpuParts, part: str, options: Namespace) -> None:
    """Run one part and write its file. A failure is reported and does not stop the others; the
    file of a part that failed or was stopped has what it had measured until then."""
    clock, result = SystemClock(), parts.result
    began_s, status = clock.now(), "stopped"
    try:
        if options.device == "cpu" and part not in SERVER_PARTS:
            result[part] = {"skipped": "needs an NVIDIA GPU"}
        else:
            result[part] = parts.measures()[part]() or result[part]
        status = "failed" if part in result["failed"] else "done"
    except Exception:  # noqa: BLE001 -- reported, and the other parts are run
        traceback.print_exc()
        result["failed"].append(part)
        status = "failed"
    finally:
        seconds, found = clock.now() - began_s, result.get(part, {})
        shown = json.dumps(found, default=float)
        print(f"{part}: {status} after {seconds:.1f} s {shown}", file=sys.stderr, flush=True)
        if options.out is not None:
            settings = {name: getattr(options, name) for name in ("model", "device", "quick")}
            write_part(
                options.out,
                part,
                found,
                commit=options.commit,
                settings=settings,
                status=status,
                seconds=seconds,
                ceilings=result["ceilings"],
            )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="headwater bench gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="parts to measure, separated by commas (all)"
    )
    parser.add_argument(
        "--model", default="8b", help="shape of the model, such as 8b, 1b or qwen3-8b (8b)"
    )
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format")
    parser.add_argument("--folder", type=Path, help="where files are written (temporary)")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of the all-miss runs (6)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `sessions` (3)")
    parser.add_argument(
        "--budgets",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        default=(1024, 2048, 8192),
        metavar="N,N",
        help="fixed tokens per step that `mixed` is compared with (1024,2048,8192)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: test the benchmark (cuda)",
    )
    parser.add_argument(
        "--model-folder",
        type=Path,
        metavar="DIR",
        help="where the model's files for servers are kept, and made if missing (temporary)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/PART.json when a part ends (no files)",
    )
    parser.add_argument(
        "--commit", help="the measured commit, written to the files of --out (asked of git)"
    )
    parser.add_argument("--quick", action="store_true", help="smaller batches, fewer repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
