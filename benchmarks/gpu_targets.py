"""The targets of the GPU path, and the files that `scripts/gpu` writes.

A check takes its figure from the results of the parts, so nothing is typed by hand. `Results`
has the result of each part that is done, by its name.
"""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]
Figure = Callable[[Results], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One figure and its bound."""

    label: str
    parts: tuple[str, ...]
    figure: Figure
    bound: float
    is_most: bool = False
    """Whether the bound is a maximum; otherwise it is a minimum."""

    def is_reached(self, figure: float) -> bool:
        return figure <= self.bound if self.is_most else figure >= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A line of the targets of benchmarks/results/FILE.json."""

    file: str
    what: str
    reason: str
    checks: tuple[Check, ...]

    def target(self) -> str:
        """The bounds as the page shows them."""
        bounds = [shown(check.bound) for check in self.checks]
        text = bounds[0] if len(set(bounds)) == 1 else " / ".join(bounds)
        return f"{'at most' if self.checks[0].is_most else 'at least'} {text}"

    def reached(self, results: Results) -> str:
        """The figures as the page shows them, and which of them miss the target."""
        figures = [check.figure(results) for check in self.checks]
        missed = [
            check.label
            for check, figure in zip(self.checks, figures, strict=True)
            if not check.is_reached(figure)
        ]
        text = " / ".join(map(shown, figures))
        if not missed:
            return text
        return (
            f"{text}: missed"
            if len(missed) == len(figures)
            else f"{text}: missed at {', '.join(missed)}"
        )


def shown(figure: float) -> str:
    """A figure as text: the larger it is, the fewer decimals it has."""
    if figure == int(figure) and abs(figure) >= 10:
        return f"{figure:,.0f}"
    return f"{figure:.3f}".rstrip("0").rstrip(".") if abs(figure) < 10 else f"{figure:,.1f}"


def at(part: str, *keys: str) -> Figure:
    """The figure at this place in the result of a part."""

    def figure(results: Results) -> float:
        found: Any = results[part]
        for key in keys:
            found = found[key]
        return float(found)

    return figure


def _least(label: str, bound: float, part: str, *keys: str) -> Check:
    return Check(label=label, parts=(part,), figure=at(part, *keys), bound=bound)


def _most(label: str, bound: float, part: str, *keys: str) -> Check:
    return Check(label=label, parts=(part,), figure=at(part, *keys), bound=bound, is_most=True)


def _inverse(figure: Figure) -> Figure:
    return lambda results: 1 / figure(results)


def _of_in_process(clients: str) -> Figure:
    outside, inside = (
        at("http", f"greedy_{clients}", "tokens_s"),
        at("streams", clients, "closed_loop_tokens_s"),
    )
    return lambda results: outside(results) / inside(results)


def _compilations(results: Results) -> float:
    waves = results["first_wave"]
    servers = (results["http"], *(waves[name] for name in _SERVERS))
    return float(sum(server["compilations_after_ready"] for server in servers))


_SERVERS = ("new_machine", "with_host", "without_host")
_CLIENTS = ("128", "512", "1024")
_FILTERS = ("temperature_top_p", "top_k_repetition", "min_p", "seed", "top_k_top_p")
_SMALL_SHAPES = ("gemma-3-4b", "phi-4-mini", "olmo-2-7b", "1b")
_MOE, _MOE_CUT = "qwen3-30b-a3b", "qwen3-30b-a3b-12"
_MLA = "deepseek-v2-lite"


def _shares(part: str, bounds: Mapping[str, float], *before: str) -> tuple[Check, ...]:
    return tuple(
        _least(f"{batch} rows", bound, part, *before, batch, "share")
        for batch, bound in bounds.items()
    )


TARGETS = (
    Target(
        file="gpu-json",
        what="tokens/s of 128 rows with a JSON schema, share of the same rows without",
        reason="masks are made while the forward pass runs",
        checks=(_least("128 rows", 0.93, "json", "bound_of_free"),),
    ),
    Target(
        file="gpu-quantised",
        what="FP8 by channel, decode of one row",
        reason="half the bytes, less the output layer",
        checks=(_least("1 row", 1.6, "quant", "fp8_channel", "speedup", "decode_1x1024_ms"),),
    ),
    Target(
        file="gpu-quantised",
        what="FP8 by channel, decode of 128 rows of 200 / 1,024 tokens",
        reason="products of FP8 take 0.55 of the time",
        checks=(
            _least("200 tokens", 1.3, "quant", "fp8_channel", "speedup", "decode_128x200_ms"),
            _least(
                "1,024 tokens", 1.15, "quant", "fp8_channel", "speedup", "decode_128x1024_ms"
            ),
        ),
    ),
    Target(
        file="gpu-quantised",
        what="FP8 by channel, prompt of 8,192 tokens",
        reason="products of FP8 take 0.55 of the time",
        checks=(_least("8,192", 1.3, "quant", "fp8_channel", "speedup", "prefill_8192_ms"),),
    ),
    Target(
        file="gpu-quantised",
        what="4 bits, decode of one row",
        reason="a quarter of the bytes, less the output layer",
        checks=(_least("1 row", 2.2, "quant", "int4", "speedup", "decode_1x1024_ms"),),
    ),
    Target(
        file="gpu-mxfp4",
        what="share of the packed roofline at batch 1 / 32 / 128",
        reason="decode reads the touched experts once; the rest is launches",
        checks=_shares("mxfp4", {"1": 0.45, "32": 0.45, "128": 0.45}),
    ),
    Target(
        file="gpu-mxfp4",
        what="prompt of 8,192 tokens, share of the flop bound",
        reason="grouped GEMMs of small experts are less efficient than large ones",
        checks=(_least("8,192", 0.45, "mxfp4", "prefill", "share"),),
    ),
    Target(
        file="gpu-fp8-experts",
        what="share of the roofline of what is read at batch 1 / 32 / 128, scales of blocks",
        reason="decode reads the touched experts once; the rest is launches",
        checks=_shares("fp8moe", {"1": 0.45, "32": 0.45, "128": 0.45}, "fp8_block"),
    ),
    Target(
        file="gpu-fp8-experts",
        what="the same, scales of channels",
        reason="the same",
        checks=_shares("fp8moe", {"1": 0.45, "32": 0.45, "128": 0.45}, "fp8_channel"),
    ),
    Target(
        file="gpu-fp8-latents",
        what="tokens in the same memory",
        reason="half the bytes, and a scale for each token",
        checks=(_least("tokens", 1.9, "fp8mla", "ratio", "token_bytes"),),
    ),
    Target(
        file="gpu-sampling",
        what="of greedy at 128 rows, each filter",
        reason="what chat clients send should cost about as much as greedy",
        checks=tuple(
            _least(name, 0.97, "sampling", "128", name, "of_greedy") for name in _FILTERS
        ),
    ),
    Target(
        file="gpu-sampling",
        what="of greedy at 512 rows, each filter",
        reason="the same; logits no longer fit the second-level cache",
        checks=tuple(
            _least(name, 0.95, "sampling", "512", name, "of_greedy") for name in _FILTERS
        ),
    ),
    Target(
        file="gpu-sampling",
        what="5 logprobs, of greedy at 128 / 512 rows",
        reason="the same",
        checks=tuple(
            _least(rows, 0.95, "sampling", rows, "logprobs_5", "of_greedy")
            for rows in ("128", "512")
        ),
    ),
    Target(
        file="gpu-sampling",
        what="step with one row of each kind among 128, times an all-greedy step",
        reason="one row must not slow the others",
        checks=(
            Check(
                label="128 rows",
                parts=("sampling",),
                figure=_inverse(at("sampling", "128", "one_row_of_each", "of_greedy")),
                bound=1.02,
                is_most=True,
            ),
        ),
    ),
    Target(
        file="gpu-streams",
        what="share of roofline at 512 and 1,024 rows",
        reason="the roofline is the weights read or multiplied, whichever takes longer, and the KV read",
        checks=_shares("streams", {"512": 0.80, "1024": 0.80}),
    ),
    Target(
        file="gpu-http",
        what="one event for each token after the first, at 128 / 512 / 1,024 clients",
        reason="clients see tokens as they are made",
        checks=tuple(
            _least(count, 0.98, "http", f"greedy_{count}", "events_of_tokens")
            for count in _CLIENTS
        ),
    ),
    Target(
        file="gpu-http",
        what="tokens/s over those in one process, 128 / 512 / 1,024 clients",
        reason="HTTP must not be the limit",
        checks=tuple(
            Check(
                label=count, parts=("http", "streams"), figure=_of_in_process(count), bound=0.93
            )
            for count in _CLIENTS
        ),
    ),
    Target(
        file="gpu-http",
        what="time between tokens while all decode, p99 over p50, 128 / 512 / 1,024 clients",
        reason="tokens come evenly",
        checks=tuple(
            _most(count, 2.0, "http", f"together_{count}", "p99_of_p50") for count in _CLIENTS
        ),
    ),
    Target(
        file="gpu-http",
        what="first wave with a host tier of 48 GiB, times the second wave, p50 / p99, and the same on a new machine",
        reason="nothing is slow after ready",
        checks=tuple(
            _most(f"{prefix}{which}", 1.2, "first_wave", f"{prefix}{which}_over_second_wave")
            for prefix in ("", "new_machine_")
            for which in ("p50", "p99")
        ),
    ),
    Target(
        file="gpu-http",
        what="first wave with a host tier of 48 GiB, times one without, p50 / p99, and the same on a new machine",
        reason="the host tier must cost nothing",
        checks=tuple(
            _most(f"{prefix}{which}", 1.1, "first_wave", f"{prefix}{which}_over_without_host")
            for prefix in ("", "new_machine_")
            for which in ("p50", "p99")
        ),
    ),
    Target(
        file="gpu-http",
        what="mixed load: between tokens p99, ms",
        reason="193 ms with a fixed budget",
        checks=(_most("p99", 40.0, "mixed", "adaptive", "itl_p99_ms"),),
    ),
    Target(
        file="gpu-http",
        what="mixed load: throughput of the best fixed budget",
        reason="even tokens must not cost throughput",
        checks=(_least("adaptive", 0.95, "mixed", "adaptive_of_best_fixed"),),
    ),
    Target(
        file="gpu-http",
        what="ready, warm caches / new machine, s",
        reason="restarts are frequent",
        checks=(
            _most("warm caches", 25.0, "first_wave", "with_host", "ready_s"),
            _most("new machine", 90.0, "first_wave", "new_machine", "ready_s"),
        ),
    ),
    Target(
        file="gpu-http",
        what="kernels compiled or loaded after ready, in four servers",
        reason="no request waits for a compiler",
        checks=(
            Check(
                label="all servers",
                parts=("http", "first_wave"),
                figure=_compilations,
                bound=0,
                is_most=True,
            ),
        ),
    ),
    Target(
        file="gpu-sessions",
        what="cached share of the possible, lowest of turns 2 to 4 and of all rounds",
        reason="everything before the new text of a turn was computed before",
        checks=(_least("lowest", 0.97, "sessions", "least_of_possible"),),
    ),
    Target(
        file="gpu-sessions",
        what="turns 2 to 4, share of the time without a host tier, median of the rounds",
        reason="9.0 of 27.3 s had been seen with other settings",
        checks=(_most("median", 0.35, "sessions", "time_ratio"),),
    ),
    Target(
        file="gpu-mla",
        what="share of roofline at batch 1 / 32 / 128",
        reason="decode reads the touched experts once; the rest is launches",
        checks=_shares("mla", {"1": 0.50, "32": 0.50, "128": 0.50}, _MLA),
    ),
    Target(
        file="gpu-mla",
        what="KV bytes of a token",
        reason="27 layers of 512 + 64 numbers of two bytes",
        checks=(_most("bytes", 31_104, "mla", _MLA, "kv_token_bytes"),),
    ),
    Target(
        file="gpu-families",
        what="share of roofline at batch 1 and 32, Gemma-3-4B, Phi-4-mini, OLMo-2-7B, Llama-3.2-1B",
        reason="small models have short steps, in which launches and norms weigh more",
        checks=tuple(
            _least(f"{shape} x {batch}", 0.75, "families", shape, batch, "share")
            for shape in _SMALL_SHAPES
            for batch in ("1", "32")
        ),
    ),
    Target(
        file="gpu-fp8-kv",
        what="tokens in the same memory",
        reason="half the bytes, and a scale for each head",
        checks=(_least("tokens", 1.9, "fp8kv", "ratio", "token_bytes"),),
    ),
    Target(
        file="gpu-fp8-kv",
        what="first token of 32,768 tokens from the host, share of bfloat16's time",
        reason="half the bytes to copy",
        checks=(
            Check(
                label="32,768",
                parts=("fp8kv",),
                figure=_inverse(at("fp8kv", "ratio", "host_hit_32k_ms")),
                bound=0.55,
                is_most=True,
            ),
        ),
    ),
    Target(
        file="gpu-fp8-kv",
        what="decode, 96 rows of 8,192 tokens",
        reason="attention reads most of the bytes of such a step",
        checks=(_least("96 rows", 1.5, "fp8kv", "ratio", "decode_96x8192_ms"),),
    ),
    Target(
        file="gpu-handoff",
        what="`cuda`: share of a copy within the device",
        reason="the copy must be the limit",
        checks=(_least("cuda", 0.8, "handoff", "links", "cuda", "share"),),
    ),
    Target(
        file="gpu-handoff",
        what="`shm` / `tcp`: share of the pinned ceiling",
        reason="the PCIe link must be the limit; not possible with sockets of the kernel",
        checks=tuple(
            _least(link, 0.8, "handoff", "links", link, "share") for link in ("shm", "tcp")
        ),
    ),
    Target(
        file="gpu-handoff",
        what="first token of 32,768 tokens handed off by `cuda`, ms later",
        reason="two decode steps",
        checks=(_most("cuda", 15.0, "handoff", "first", "cuda", "added_ms"),),
    ),
    Target(
        file="gpu-handoff",
        what="step p99 of D at the pace of one prefill instance, `cuda` / `shm` / `tcp`",
        reason="arriving blocks must not disturb decoding",
        checks=tuple(
            _most(link, 1.1, "handoff", "links", link, "paced", "p99_ratio")
            for link in ("cuda", "shm", "tcp")
        ),
    ),
    Target(
        file="gpu-suffix",
        what="device hit of 32 k, ms",
        reason="weights are read once (3.8 ms) and 64 queries attend to 32 k keys",
        checks=(_most("32,768", 8.0, "first_token", "device_ms"),),
    ),
    Target(
        file="gpu-first-token",
        what="host hit relative to its bytes over PCIe",
        reason="the copy must be the limit; 1.07 on 15 November",
        checks=(_most("host", 1.07, "first_token", "host_over_ceiling"),),
    ),
    Target(
        file="gpu-first-token",
        what="host hit, times faster than computing with transformers",
        reason="a hit must be worth its memory",
        checks=(_least("host", 10.0, "first_token", "transformers_over_host"),),
    ),
    Target(
        file="gpu-kernels",
        what="each cell, time of FlashInfer's fastest variant, divided by Headwater's",
        reason="the attention kernels must be no slower than the fastest known ones",
        checks=(_least("lowest cell", 1.0, "kernels", "lowest_ratio"),),
    ),
    Target(
        file="gpu-moe",
        what="share of roofline at batch 1 / 32 / 128, 48 layers",
        reason="decode reads the touched experts once; the rest is launches",
        checks=_shares("moe", {"1": 0.45, "32": 0.55, "128": 0.55}, _MOE),
    ),
    Target(
        file="gpu-moe",
        what="the same, 12 layers",
        reason="the same",
        checks=_shares("moe", {"1": 0.45, "32": 0.55, "128": 0.55}, _MOE_CUT),
    ),
    Target(
        file="gpu-moe",
        what="prompt of 8,192 tokens, share of the flop bound, 48 / 12 layers",
        reason="grouped GEMMs of small experts are less efficient than large ones",
        checks=tuple(
            _least(shape, 0.45, "moe", shape, "prefill", "share") for shape in (_MOE, _MOE_CUT)
        ),
    ),
    Target(
        file="gpu-copies",
        what="share of the pinned ceiling, to the host / to the device",
        reason="the PCIe link must be the limit",
        checks=tuple(
            _least(name, 0.99, "copies", name, "share")
            for name in ("device_to_host", "host_to_device")
        ),
    ),
    Target(
        file="gpu-copies",
        what="step p99 with 40 GB/s moving, to the host / to the device",
        reason="copies must not disturb decoding",
        checks=tuple(
            _most(name, 1.05, "copies", name, "p99_ratio")
            for name in ("device_to_host", "host_to_device")
        ),
    ),
    Target(
        file="gpu-prefill",
        what="8,192 / 32,768 tokens relative to transformers",
        reason="1.29 and 1.21 on 15 November; 1.0 and 1.2 asked before",
        checks=(
            _least("8,192", 1.29, "prefill", "8192", "ratio"),
            _least("32,768", 1.21, "prefill", "32768", "ratio"),
        ),
    ),
    Target(
        file="gpu-decode",
        what="share of roofline at batch 1 / 32 / 128 / 256",
        reason="the figures of 15 November; decode is bound by memory, the rest is launches and norms",
        checks=_shares("decode", {"1": 0.86, "32": 0.84, "128": 0.86, "256": 0.80}),
    ),
    Target(
        file="gpu-transformers",
        what="1,000 tokens in, 32 out, while all decode",
        reason="an earlier figure of 413 tokens/s for transformers in this row",
        checks=(
            _least(
                "1,000 in", 30.0, "decode", "continuous_128", "1k_in_32_out", "decoding_ratio"
            ),
        ),
    ),
    Target(
        file="gpu-all-miss",
        what="share of throughput lost",
        reason="tiers must cost nothing to traffic that does not repeat",
        checks=(_most("loss", 0.01, "all_miss", "loss"),),
    ),
)


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of all parts, by part."""
    files = (json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json"))
    return {content["part"]: content for content in files if "part" in content}


def print_targets(folder: Path, parts: Collection[str]) -> None:
    """One line for each target of these parts: the figure, the target, reached or missed."""
    files = read_files(folder)
    results = {part: content["result"] for part, content in files.items()}
    for target in TARGETS:
        for check in target.checks:
            if not set(check.parts) & set(parts):
                continue
            name = f"{target.file}: {target.what}"
            name += f" [{check.label}]" if len(target.checks) > 1 else ""
            print(f"{_outcome(check, results):<34} {name}")
    for part in sorted(parts):
        if part.startswith("tests-"):
            counts = results.get(part)
            print(f"{_tests_outcome(counts):<34} {part}")


def _outcome(check: Check, results: Results) -> str:
    bound = f"{'<=' if check.is_most else '>='} {shown(check.bound)}"
    try:
        figure = check.figure(results)
    except (KeyError, TypeError, ZeroDivisionError):
        return f"not measured {bound}"
    return f"{'reached' if check.is_reached(figure) else 'MISSED'} {shown(figure)} {bound}"


def _tests_outcome(counts: Mapping[str, Any] | None) -> str:
    if not counts:
        return "not run"
    word = "MISSED" if counts["failed"] else "passed" if counts["passed"] else "skipped"
    return f"{word} {counts['passed']} failed {counts['failed']} skipped {counts['skipped']}"


def read_report(report: Path) -> dict[str, Any]:
    """The numbers and the failed tests of a report of pytest; empty if it was not written."""
    try:
        suites = list(ElementTree.parse(report).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return {}
    whole, failed, skipped = (
        sum(sum(int(suite.get(name, 0)) for name in names) for suite in suites)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    names = [
        f"{case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "passed": whole - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "names": names,
    }
