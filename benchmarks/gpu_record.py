"""Turns the files of `scripts/gpu` into the files benchmarks/results/gpu-*.json.

A table takes every figure from the results. It is written only if all of its parts are done,
were measured at one commit on one kind of machine, and were not measured with `--quick` or on a
CPU.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import TARGETS, Results, read_files, shown

Row = list[str | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTable:
    """One file of results."""

    file: str
    parts: tuple[str, ...]
    title: str
    columns: tuple[str | tuple[str, int], ...]
    """Names; a column of numbers also has its number of decimals."""

    rows: Callable[[Results], list[Row]]
    summary: Callable[[Results], tuple[str, str, str]] | None = None
    """What was measured, the figure, and what it is compared with."""


def record(folder: Path, target: Path) -> list[str]:
    """Write the tables whose parts are in `folder`; returns a line for each one of them that
    could not be written, and for each file written."""
    files = read_files(folder)
    lines = []
    for table in TABLES:
        if not any(part in files for part in table.parts):
            continue
        try:
            content = _content(table, files)
        except (KeyError, TypeError, ValueError) as error:
            lines.append(f"{table.file}: not written: {error!r}")
            continue
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (target / f"{table.file}.json").write_text(text, encoding="utf-8")
        lines.append(f"{table.file}: written")
    return lines


def _content(table: GpuTable, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    found = [_done(part, files) for part in table.parts]
    results = {content["part"]: content["result"] for content in found}
    commits, machines, dates = (
        sorted({str(content[name]) for content in found})
        for name in ("commit", "machine", "date")
    )
    if len(commits) > 1 or len(machines) > 1:
        raise ValueError(f"parts of several commits or machines: {commits}, {machines}")
    summary = table.summary(results) if table.summary else None
    return {
        "title": table.title,
        "date": dates[-1],
        "commit": commits[0],
        "recorded_in": None,
        "machine": machines[0],
        "command": found[0]["command"]
        if len(found) == 1
        else f"python scripts/gpu {' '.join(table.parts)} --out DIR",
        "targets": [
            {
                "what": each.what,
                "target": each.target(),
                "reason": each.reason,
                "reached": each.reached(results),
            }
            for each in TARGETS
            if each.file == table.file
        ],
        "summary": [dict(zip(("what", "figure", "against"), summary, strict=True))]
        if summary
        else [],
        "columns": [
            {"name": each} if isinstance(each, str) else {"name": each[0], "decimals": each[1]}
            for each in table.columns
        ],
        "rows": table.rows(results),
    }


def _done(part: str, files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The file of a part, if its figures may be recorded."""
    if part not in files:
        raise ValueError(f"{part} was not measured")
    content = files[part]
    if content["status"] != "done":
        raise ValueError(f"{part} {content['status']}")
    if content["settings"]["quick"] or content["settings"]["device"] == "cpu":
        raise ValueError(f"{part} was measured with --quick or on a CPU")
    if not content["commit"]:
        raise ValueError(f"{part} has no commit; give --commit to scripts/gpu")
    return content


def _pair(first: float, second: float, decimals: int = 0) -> str:
    return f"{first:,.{decimals}f} / {second:,.{decimals}f}"


def _decode_rows(found: Mapping[str, Any], *first: str) -> list[Row]:
    """Batch, tokens/s, step, roofline, share; experts touched if they were counted."""
    rows: list[Row] = []
    for batch in sorted((key for key in found if key.isdigit()), key=int):
        each = found[batch]
        touched = [each["experts_touched"]] if "experts_touched" in each else []
        rows.append(
            [*first, int(batch), each["tokens_s"], each["step_ms"], *touched,
             each["roofline_ms"], each["share"]]
        )  # fmt: skip
    return rows


def _decode(results: Results) -> list[Row]:
    return [
        [int(batch), each["tokens_s"], f"{each['step_ms']:.2f} ({each['step_p99_ms']:.2f})",
         each["roofline_ms"], each["share"]]
        for batch, each in results["decode"].items()
        if batch.isdigit()
    ]  # fmt: skip


def _transformers(results: Results) -> list[Row]:
    rows: list[Row] = []
    names = {"1k_in_32_out": "1,000 tokens in, 32 out", "64_in_64_out": "64 in, 64 out"}
    for key, name in names.items():
        each = results["decode"]["continuous_128"][key]
        for kind, prefix in (("while all are decoding", "decoding_"), ("prompts included", "")):
            rows.append(
                [f"{name}, {kind}", each[f"{prefix}tokens_s"],
                 each[f"transformers_{prefix}tokens_s"], each[f"{prefix}ratio"]]
            )  # fmt: skip
    return rows


def _copies(results: Results) -> list[Row]:
    rows: list[Row] = []
    for key, name in (
        ("device_to_host", "device to host"),
        ("host_to_device", "host to device"),
    ):
        each = results["copies"][key]
        rows.append([name, each["gb_s"], each["share"], *_beside(each, "copies")])
        rows.append(
            ["the same, on the device", None, None, *_beside(each["on_device"], "copies")]
        )
    return rows


def _beside(each: Mapping[str, float], what: str) -> list[str | float | None]:
    """Median and p99 of steps without and with something else going on."""
    return [
        f"{each[f'step_{which}_ms']:.2f} / {each[f'step_{which}_ms_with_{what}']:.2f} "
        f"({each[f'{which}_ratio']:.3f})"
        for which in ("p50", "p99")
    ]


def _handoff(results: Results) -> list[Row]:
    rows: list[Row] = []
    for link, each in results["handoff"]["links"].items():
        first = results["handoff"]["first"][link]
        rows.append(
            [f"`{link}`", each["gb_s"], each["share"],
             *(f"{_beside(each[pace], 'blocks')[1]}, blocks at {each[pace]['gb_s']:.1f} GB/s"
               for pace in ("paced", "unpaced")),
             f"{_pair(first['local_ms'], first['handed_off_ms'])} ({first['added_ms']:+.1f})"]
        )  # fmt: skip
    return rows


def _prefill(results: Results) -> list[Row]:
    return [
        [int(length), each["tokens_s"], each["transformers_tokens_s"], each["ratio"]]
        for length, each in results["prefill"].items()
    ]


def _first_token(results: Results) -> list[Row]:
    names = {
        "recomputed_ms": "computed",
        "transformers_ms": "computed by transformers",
        "device_ms": "found on the device",
        "host_ms": "loaded from the host",
        "ceiling_ms": "its bytes over the PCIe ceiling",
        "file_ms": "loaded from a file, page cache bypassed",
    }
    return [[name, results["first_token"][key]] for key, name in names.items()]


def _start(results: Results) -> list[Row]:
    found = results["start"]
    return [
        [
            f"first token ({found['pinned_then']:.0%} of the slab pinned)",
            found["first_token_s"],
        ],
        ["blocks of that prompt on the host", found["first_blocks_saved_s"]],
        ["whole slab pinned", found["pinned_s"]],
    ]


def _all_miss(results: Results) -> list[Row]:
    found = results["all_miss"]
    low, high = found["loss_low"] * 100, found["loss_high"] * 100
    return [
        ["throughput lost to the host tier",
         f"{found['loss'] * 100:.2f} % (95 % interval {low:.2f} to {high:.2f} %)"],
        ["blocks written to the host", f"{found['written_gb']:.0f} GB"],
    ]  # fmt: skip


def _trace(results: Results) -> list[Row]:
    rows: list[Row] = []
    for key, name in (("without_host", "none"), ("with_host", "9,600 blocks")):
        each = results["trace"][key]
        rows.append(
            [name, each["output_tokens_s"], each["prompt_tokens_s"],
             _pair(each["first_token_p50_ms"], each["first_token_p99_ms"]),
             f"{each['device_hits']:.1%} / {each['host_hits']:.1%}", each["preemptions"]]
        )  # fmt: skip
    return rows


_KINDS = {
    "greedy": "greedy",
    "temperature_top_p": "temperature 0.8, top-p 0.95",
    "top_k_repetition": "temperature 0.8, top-k 50, repetition penalty 1.1",
    "min_p": "temperature 0.8, min-p 0.05",
    "seed": "temperature 1, seeds",
    "top_k_top_p": "temperature 0.7, top-k 40, top-p 0.9",
    "logprobs_5": "greedy with 5 logprobs",
    "one_row_of_each": "one row of each, the others greedy",
}


def _sampling(results: Results) -> list[Row]:
    found = results["sampling"]
    return [
        [name, *(found[rows][key][what] for rows in ("128", "512") for what in ("step_ms", "of_greedy"))]
        for key, name in _KINDS.items()
    ]  # fmt: skip


def _streams(results: Results) -> list[Row]:
    return [
        [int(rows), f"{each['step_ms']:.2f} ({each['step_p99_ms']:.2f})", each["roofline_ms"],
         each["share"], each["closed_loop_tokens_s"]]
        for rows, each in results["streams"].items()
    ]  # fmt: skip


def _json(results: Results) -> list[Row]:
    found = results["json"]
    return [
        [name, found[key]["tokens_s"], found[key]["step_ms"]]
        for key, name in (("free", "unconstrained"), ("bound", "JSON schema"))
    ]


def _experts(part: str, names: Mapping[str, str]) -> Callable[[Results], list[Row]]:
    """Rows of these shapes; an empty name in the results is the part itself."""

    def rows(results: Results) -> list[Row]:
        found: list[Row] = []
        for key, name in names.items():
            shape = results[part][key] if key else results[part]
            found += _decode_rows(shape, name)
            if "prefill" in shape:
                each = shape["prefill"]
                found.append(
                    [name, "prompt of 8,192", each["tokens_s"], each["first_token_ms"], None,
                     each["bound_ms"], each["share"]]
                )  # fmt: skip
        return found

    return rows


_SHAPES = {
    "gemma-3-4b": "Gemma-3-4B",
    "phi-4-mini": "Phi-4-mini",
    "olmo-2-7b": "OLMo-2-7B",
    "1b": "Llama-3.2-1B",
}


_KV_FIGURES = {
    "token_bytes": "KV of a token, bytes",
    "decode_96x8192_ms": "decode, 96 rows of 8,192 tokens, ms",
    "decode_1x1024_ms": "decode, 1 row of 1,024 tokens, ms",
    "prefill_8192_ms": "prompt of 8,192 tokens, ms",
    "computed_32k_ms": "prompt of 32,768 tokens, computed, ms",
    "host_hit_32k_ms": "prompt of 32,768 tokens, from the host, ms",
}


def _kv_rows(part: str, names: Mapping[str, str]) -> Callable[[Results], list[Row]]:
    """Rows of these figures, in bfloat16 and in 8 bits."""

    def rows(results: Results) -> list[Row]:
        found = results[part]
        return [
            [name, found["bfloat16"][key], found["fp8"][key], found["ratio"][key]]
            for key, name in names.items()
        ]

    return rows


_METHODS = {
    "bfloat16": "bfloat16",
    "fp8_channel": "FP8 by channel",
    "fp8_block": "FP8 in blocks of 128 x 128",
    "int4": "4 bits, groups of 128",
}


def _quantised(results: Results) -> list[Row]:
    found = results["quant"]
    steps = ("decode_1x1024_ms", "decode_128x200_ms", "decode_128x1024_ms", "prefill_8192_ms")
    return [
        [name, *(found[key][step] for step in steps),
         found[key].get("logits_relative_error"), found[key].get("greedy_agreement")]
        for key, name in _METHODS.items()
    ]  # fmt: skip


def _http(results: Results) -> list[Row]:
    http, mixed, waves = results["http"], results["mixed"], results["first_wave"]
    loads: list[tuple[str, str, Mapping[str, float]]] = []
    for key, name in (
        ("new_machine", "48 GiB, new machine"),
        ("with_host", "48 GiB"),
        ("without_host", "none"),
    ):
        for number, which in enumerate(("first wave after ready", "second wave")):
            loads.append((which, name, waves[key]["waves"][number]))
    loads += [
        (
            f"{count} clients, 200 in of which 192 shared, 128 out",
            "default",
            http[f"greedy_{key}"],
        )
        for key, count in (("128", "128"), ("512", "512"), ("1024", "1,024"))
    ]
    for key in ("temperature_top_p", "top_k_repetition", "logprobs_5"):
        loads.append((f"128 clients, {_KINDS[key]}", "default", http[f"{key}_128"]))
    for key in (key for key in mixed if isinstance(mixed[key], dict)):
        budget = key.replace("fixed_", "tokens per step: ")
        loads.append(
            (f"128 clients, 1,000 in, nothing shared, 128 out, {budget}", "none", mixed[key])
        )
    return [
        [load, host, each["tokens_s"],
         _pair(each["first_token_p50_ms"], each["first_token_p99_ms"]),
         _pair(each["itl_p50_ms"], each["itl_p99_ms"], 1)]
        for load, host, each in loads
    ]  # fmt: skip


def _sessions(results: Results) -> list[Row]:
    rows: list[Row] = []
    for number, each in enumerate(results["sessions"]["rounds"], 1):
        for key, name in (("with_host", "48 GiB"), ("without_host", "none")):
            shares = [f"{share:.3f}" for share in each[key]["cached"][1:]]
            rows.append(
                [f"{name}, round {number}", *shares, f"{sum(each[key]['turn_s'][1:]):.1f} s"]
            )
    return rows


def _kernels(results: Results) -> list[Row]:
    return [
        [
            name.replace("_", " "),
            each["ours_ms"],
            each["ratio"] * each["ours_ms"],
            each["ratio"],
        ]
        for name, each in results["kernels"].items()
        if isinstance(each, dict) and "ratio" in each
    ]


def _summary_of(
    what: str, file: str, against: str, unit: str = ""
) -> Callable[[Results], tuple[str, str, str]]:
    """The figures of the first target of a file."""

    def line(results: Results) -> tuple[str, str, str]:
        target = next(each for each in TARGETS if each.file == file)
        figures = " / ".join(shown(check.figure(results)) for check in target.checks)
        return what, f"{figures}{unit}", f"{against}; target {target.target()}"

    return line


def _summary_quantised(results: Results) -> tuple[str, str, str]:
    found = results["quant"]
    steps = ("decode_1x1024_ms", "decode_128x200_ms", "decode_128x1024_ms", "prefill_8192_ms")
    figures = [f"{found['fp8_channel']['speedup'][step]:.2f}" for step in steps]
    four = found["int4"]["speedup"]["decode_1x1024_ms"]
    return (
        "FP8 weights: decode of 1 row / 128 x 200 / 128 x 1 k / prompt of 8 k; 4 bits: 1 row, H200",
        f"{' / '.join(figures)}; {four:.2f} times",
        "bfloat16; target 1.6 / 1.3 / 1.15 / 1.3; 2.2",
    )


def _summary_sessions(results: Results) -> tuple[str, str, str]:
    found = results["sessions"]
    return (
        "multi-turn sessions larger than the device: turns 2 to 4, time without a host tier, H200",
        f"{found['time_ratio']:.2f} of the time, {found['least_of_possible']:.2f} of the possible found",
        "no host tier; target at most 0.35, at least 0.97",
    )


def _summary_fp8_kv(results: Results) -> tuple[str, str, str]:
    ratio = results["fp8kv"]["ratio"]
    keys = ("token_bytes", "host_hit_32k_ms", "decode_96x8192_ms")
    return (
        "KV in 8 bits: tokens in the same memory / 32 k tokens from the host / decode of 96 x 8 k, H200",
        f"{' / '.join(f'{ratio[key]:.2f}' for key in keys)} times",
        "bfloat16; target 1.9 / 1.82 / 1.5",
    )


def _summary_handoff(results: Results) -> tuple[str, str, str]:
    links, first = results["handoff"]["links"], results["handoff"]["first"]
    cuda, shm = links["cuda"], links["shm"]
    rates = f"{cuda['gb_s']:,.0f} GB/s by `cuda`, {shm['gb_s']:.1f} GB/s by `shm`"
    return (
        "hand-off of 32,768 tokens between two engines on one GPU, H200",
        f"{rates}; the first token {first['cuda']['added_ms']:.0f} ms later",
        f"{cuda['share']:.2f} of a device copy, {shm['share']:.3f} of the pinned ceiling",
    )


def _summary_first_token(results: Results) -> tuple[str, str, str]:
    found = results["first_token"]
    return (
        "first token of 32,768 tokens from the host, H200",
        f"{found['host_ms']:.1f} ms",
        f"{found['recomputed_ms']:,.0f} ms computed; {found['host_over_ceiling']:.2f} of its bytes over PCIe",
    )


_DECODE_COLUMNS = (("batch", 0), ("tokens/s", 0), ("step, ms", 2))
_ROOFLINE_COLUMNS = (("roofline, ms", 2), ("share of roofline", 3))
_EXPERT_COLUMNS = (
    "shape", *_DECODE_COLUMNS, ("experts touched per layer", 1), *_ROOFLINE_COLUMNS
)  # fmt: skip

TABLES: Sequence[GpuTable] = (
    GpuTable(
        file="gpu-decode",
        parts=("decode",),
        title="Decode, context 1 k, relative to reading weights and KV once at the memory ceiling",
        columns=(("batch", 0), ("tokens/s", 0), "step, ms (p99)", *_ROOFLINE_COLUMNS),
        rows=_decode,
        summary=_summary_of(
            "decode at batch 1 / 32 / 128 / 256, 8B shape, H200",
            "gpu-decode",
            "the memory roofline",
            " of the memory roofline",
        ),
    ),
    GpuTable(
        file="gpu-transformers",
        parts=("decode",),
        title="Output tokens/s beside the continuous batching of transformers, the same 128 requests",
        columns=("128 requests", ("Headwater", 0), ("transformers", 0), ("ratio", 1)),
        rows=_transformers,
        summary=_summary_of(
            "output tokens/s while 128 requests decode, H200",
            "gpu-transformers",
            "continuous batching of transformers",
            " times",
        ),
    ),
    GpuTable(
        file="gpu-copies",
        parts=("copies",),
        title="Copies of whole blocks beside 128 decoding sequences, 41 GB/s moving",
        columns=(
            "copy",
            ("alone, GB/s", 1),
            ("share of the pinned ceiling", 3),
            "step p50, ms, without / with",
            "step p99, ms, without / with",
        ),
        rows=_copies,
        summary=_summary_of(
            "copies between device and host beside decoding, H200",
            "gpu-copies",
            "the pinned ceiling",
            " of the pinned ceiling",
        ),
    ),
    GpuTable(
        file="gpu-handoff",
        parts=("handoff",),
        title="Blocks of a 32,768-token prompt (8B shape, 4.3 GB) from one engine to another on one GPU, by link",
        columns=(
            "link",
            ("GB/s", 1),
            ("share of its ceiling", 3),
            "step p99 of 32 decoding, ms, without / with blocks at the pace of one prefill instance",
            "the same, blocks as fast as possible",
            "first token, ms, computed alone / handed off",
        ),
        rows=_handoff,
        summary=_summary_handoff,
    ),
    GpuTable(
        file="gpu-prefill",
        parts=("prefill",),
        title="Prompts, from the request to the first token, one chunk, beside transformers with SDPA",
        columns=(("tokens", 0), ("tokens/s", 0), ("transformers", 0), ("ratio", 3)),
        rows=_prefill,
        summary=_summary_of(
            "prompt of 8,192 / 32,768 tokens, H200",
            "gpu-prefill",
            "transformers with SDPA",
            " times",
        ),
    ),
    GpuTable(
        file="gpu-first-token",
        parts=("first_token",),
        title="First token of a prompt of 32,768 tokens",
        columns=("source", ("ms", 1)),
        rows=_first_token,
        summary=_summary_first_token,
    ),
    GpuTable(
        file="gpu-suffix",
        parts=("first_token",),
        title="First token of a prompt of 32,768 tokens whose blocks are on the device",
        columns=("found", ("first token, ms", 1)),
        rows=lambda results: [["on the device", results["first_token"]["device_ms"]]],
    ),
    GpuTable(
        file="gpu-start",
        parts=("start",),
        title="Start with a host tier of 64 GiB",
        columns=("event", ("s", 1)),
        rows=_start,
    ),
    GpuTable(
        file="gpu-all-miss",
        parts=("all_miss",),
        title="Traffic without hits, 48 prompts of 2,048 tokens, every block written to the host, six interleaved pairs",
        columns=("figure", "value"),
        rows=_all_miss,
        summary=_summary_of(
            "share of throughput lost to the host tier when nothing hits, H200",
            "gpu-all-miss",
            "no host tier",
        ),
    ),
    GpuTable(
        file="gpu-trace",
        parts=("trace",),
        title="The first 160 requests of the conversation trace, lengths divided by four, 32 clients, 2,400 device blocks",
        columns=(
            "host tier",
            ("output tokens/s", 0),
            ("prompt tokens/s", 0),
            "first token p50 / p99, ms",
            "hits, device / host",
            ("preemptions", 0),
        ),
        rows=_trace,
    ),
    GpuTable(
        file="gpu-sampling",
        parts=("sampling",),
        title="Decode steps of requests that sample, 8B shape, prompts of 200 tokens",
        columns=(
            "requests",
            ("step at 128 rows, ms", 2),
            ("of greedy", 3),
            ("step at 512 rows, ms", 2),
            ("of greedy, 512 rows", 3),
        ),
        rows=_sampling,
        summary=lambda results: (
            "temperature and top-p at 128 / 512 rows, H200",
            " / ".join(
                f"{results['sampling'][rows]['temperature_top_p']['of_greedy']:.3f}"
                for rows in ("128", "512")
            )
            + " of greedy",
            "0.59 at 128 rows over HTTP before, with a sort",
        ),
    ),
    GpuTable(
        file="gpu-streams",
        parts=("streams",),
        title="Many sequences in one process, 8B shape, 200 tokens in of which 192 are shared, 128 out",
        columns=(
            ("rows", 0),
            "step, ms (p99)",
            *_ROOFLINE_COLUMNS,
            ("closed loop with prompts, tokens/s", 0),
        ),
        rows=_streams,
        summary=_summary_of(
            "decode of 512 / 1,024 sequences, 8B shape, H200",
            "gpu-streams",
            "the roofline",
            " of the roofline",
        ),
    ),
    GpuTable(
        file="gpu-json",
        parts=("json",),
        title="128 rows with a JSON schema and without, 8B shape with 128,256 tokens, temperature 0.8",
        columns=("requests", ("tokens/s", 0), ("step, ms", 2)),
        rows=_json,
        summary=_summary_of(
            "tokens/s of 128 rows with a JSON schema, H200",
            "gpu-json",
            "the same rows without",
            " of unconstrained",
        ),
    ),
    GpuTable(
        file="gpu-http",
        parts=("http", "mixed", "first_wave", "streams"),
        title="Over HTTP on one machine, 8B shape, streaming, 4 client processes that begin together: first waves (16 prompts of 4,000 tokens, 16 out), rates, mixed load",
        columns=(
            "load",
            "host tier",
            ("tokens/s", 0),
            "first token p50 / p99, ms",
            "between tokens p50 / p99, ms",
        ),
        rows=_http,
        summary=_summary_of(
            "events over tokens of 128 / 512 / 1,024 clients over HTTP, H200",
            "gpu-http",
            "one event for each token",
        ),
    ),
    GpuTable(
        file="gpu-sessions",
        parts=("sessions",),
        title="64 sessions of 4 turns over HTTP, 8B shape, 1,500 device blocks: 4,000 tokens first, 500 more each turn, 64 out, 16 clients",
        columns=(
            "host tier",
            "cached share, turn 2",
            "turn 3",
            "turn 4",
            "turns 2 to 4 take",
        ),
        rows=_sessions,
        summary=_summary_sessions,
    ),
    GpuTable(
        file="gpu-moe",
        parts=("moe",),
        title="Mixture of experts, Qwen3-30B-A3B's shape, random weights made on the device, context 1 k",
        columns=_EXPERT_COLUMNS,
        rows=_experts("moe", {"qwen3-30b-a3b": "48 layers", "qwen3-30b-a3b-12": "12 layers"}),
        summary=_summary_of(
            "Qwen3-30B-A3B's shape, decode at batch 1 / 32 / 128, H200",
            "gpu-moe",
            "the memory roofline",
            " of the memory roofline",
        ),
    ),
    GpuTable(
        file="gpu-mxfp4",
        parts=("mxfp4",),
        title="GPT-OSS-20B's shape, experts packed in MXFP4, random weights, context 1 k",
        columns=_EXPERT_COLUMNS,
        rows=_experts("mxfp4", {"": "GPT-OSS-20B"}),
        summary=_summary_of(
            "GPT-OSS-20B's shape in MXFP4, decode at batch 1 / 32 / 128, H200",
            "gpu-mxfp4",
            "the packed roofline",
            " of the packed roofline",
        ),
    ),
    GpuTable(
        file="gpu-fp8-experts",
        parts=("fp8moe",),
        title="Qwen3-30B-A3B's shape, experts in FP8, other weights in bfloat16, random weights, context 1 k",
        columns=_EXPERT_COLUMNS,
        rows=_experts(
            "fp8moe", {"fp8_block": "scales of blocks", "fp8_channel": "scales of channels"}
        ),
    ),
    GpuTable(
        file="gpu-fp8-latents",
        parts=("fp8mla",),
        title="Latent KV in 8 bits beside bfloat16, DeepSeek-V2-Lite's shape, random weights",
        columns=("27 layers", ("bfloat16", 2), ("8 bits", 2), ("gain", 2)),
        rows=_kv_rows(
            "fp8mla",
            {
                "token_bytes": "KV of a token, bytes",
                "decode_96x8192_ms": "decode, 96 rows of 8,192 tokens, ms",
                "decode_1x32768_ms": "decode, 1 row of 32,768 tokens, ms",
                "prefill_8192_ms": "prompt of 8,192 tokens, ms",
            },
        ),
    ),
    GpuTable(
        file="gpu-mla",
        parts=("mla",),
        title="Latent KV (MLA), DeepSeek-V2-Lite's shape, random weights made on the device, context 1 k",
        columns=_EXPERT_COLUMNS,
        rows=_experts(
            "mla", {"deepseek-v2-lite": "27 layers", "deepseek-v2-lite-9": "9 layers"}
        ),
        summary=_summary_of(
            "DeepSeek-V2-Lite's shape, decode at batch 1 / 32 / 128, H200",
            "gpu-mla",
            "the memory roofline",
            " of the memory roofline",
        ),
    ),
    GpuTable(
        file="gpu-families",
        parts=("families",),
        title="Decode of other families' shapes, random weights, context 1 k",
        columns=("shape", *_DECODE_COLUMNS, *_ROOFLINE_COLUMNS),
        rows=_experts("families", _SHAPES),
    ),
    GpuTable(
        file="gpu-fp8-kv",
        parts=("fp8kv",),
        title="KV in 8 bits beside bfloat16, 8B shape, random weights",
        columns=("8B shape", ("bfloat16", 2), ("8 bits", 2), ("gain", 2)),
        rows=_kv_rows("fp8kv", _KV_FIGURES),
        summary=_summary_fp8_kv,
    ),
    GpuTable(
        file="gpu-quantised",
        parts=("quant",),
        title="Quantised weights beside bfloat16, 8B shape, random weights, output layer in bfloat16",
        columns=(
            "weights",
            ("1 row of 1,024, ms", 2),
            ("128 rows of 200, ms", 2),
            ("128 rows of 1,024, ms", 2),
            ("prompt of 8,192, ms", 1),
            ("relative error of logits, 4 layers", 4),
            ("same greedy token, 4 layers", 3),
        ),
        rows=_quantised,
        summary=_summary_quantised,
    ),
    GpuTable(
        file="gpu-kernels",
        parts=("kernels",),
        title="Attention kernels beside FlashInfer on the same pages, 8B shape, bfloat16",
        columns=("cell", ("ours, ms", 4), ("FlashInfer's fastest, ms", 4), ("ratio", 2)),
        rows=_kernels,
    ),
)
