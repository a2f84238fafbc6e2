"""`headwater check`: whether and how a model would be served, and what fits in each tier.

Reads config.json and the headers of the weights. No weights are loaded, and torch is not
imported.
"""

import json
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.cli.values import add_command, help_text, number_value
from headwater.config import CPU_STEP_TOKENS, EngineConfig
from headwater.device.budget import blocks_within, free_main_bytes
from headwater.device.survey import ModelSurvey, survey, survey_of
from headwater.errors import ConfigError, ModelError
from headwater.launch.hub import cached_folder, is_hub_name, remote_tensors
from headwater.storage.codec import HEADER_BYTES
from headwater.transfer.layout import KVLayout
from headwater.transfer.slab import slot_bytes

_GIB = 1 << 30
_COMMAND_TIMEOUT_S = 10.0
_ENGINE = EngineConfig()

_ABOUT = """\
Report whether and how a model would be served, how much memory its weights and one token of KV take,
and how many tokens each tier would hold. Nothing is loaded; it takes a second.

  headwater check ./Qwen3-8B
  headwater check Qwen/Qwen3-8B             # downloads a few small files, no weights
  headwater check ./Qwen3-8B --device cuda --device-gib 80 --swap-space 256 --storage-gib 4096

Exits with 0 if the model would be served; otherwise with 1 and the reason.
"""

_HOW = {
    "fused": "the fused decoder in captured graphs, if a check at start finds it equal to the "
    "model's own code",
    "generic": "the model's own code over our attention kernels, not captured",
    "cpu": "the model's own code over our attention on the CPU",
}


def add_check(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "check MODEL [flags]", _ABOUT)
    parser.add_argument("model", metavar="MODEL", help="model directory or Hugging Face name")
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit, if MODEL is a Hugging Face name",
    )
    parser.add_argument(
        "--device",
        help="cpu or cuda (default: cuda if there is a GPU or --device-gib is given, else cpu)",
    )
    parser.add_argument(
        "--device-gib",
        type=number_value,
        metavar="GIB",
        help="memory of the device before the weights are loaded (default: what is free here)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help=help_text("type of stored KV; auto is --dtype"),
    )
    parser.add_argument("--dtype", default="auto", help=help_text("type of weights and KV"))
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        default=_ENGINE.block_tokens,
        help=help_text("tokens per block"),
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=number_value,
        metavar="SHARE",
        help="share of the memory that is free after the weights, for KV blocks (default: as for serve)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        default=CPU_STEP_TOKENS,
        help=help_text("maximum number of tokens computed in one step"),
    )
    parser.add_argument(
        "--swap-space",
        type=number_value,
        metavar="GIB",
        default=0.0,
        help=help_text("main memory of the host tier in GiB"),
    )
    parser.add_argument(
        "--storage-gib",
        type=number_value,
        metavar="GIB",
        default=0.0,
        help=help_text("size of the storage tier in GiB"),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def run_check(options: Namespace) -> int:
    """Print the report. Returns 0 if the model would be served, otherwise 1."""
    _check_sizes(options)
    try:
        report = make_report(options)
    except ModelError as exc:
        report = {"model": options.model, "served": False, "reason": str(exc)}
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(report)))
    return 0 if report["served"] else 1


def make_report(options: Namespace) -> dict[str, Any]:
    """The report as one value."""
    found = replace(_survey(options), has_fp8_kv=options.kv_cache_dtype == "fp8")
    device = options.device or _likely_device(options)
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' is not supported; use cpu, cuda or cuda:N")
    layout = found.layout(options.block_size)
    token_bytes = layout.block_bytes // layout.block_tokens
    how = "cpu" if device == "cpu" else "fused" if found.is_fused else "generic"
    return {
        "model": options.model,
        "served": True,
        "reason": None,
        "model_type": found.model_type,
        "path": how,
        "dtype": found.dtype,
        "max_model_len": found.max_model_len,
        "weights": {
            "bytes": found.weight_bytes,
            "stored_bytes": found.stored_bytes,
            "files": found.num_files,
            "quantization": found.quantization,
        },
        "kv": {
            "token_bytes": token_bytes,
            "block_tokens": layout.block_tokens,
            "block_bytes": layout.block_bytes,
            "layers": layout.num_layers,
            "planes": layout.planes,
            "heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "element_bytes": layout.element_bytes,
            "scale_bytes": layout.scale_bytes,
            "format": layout.kv_format,
        },
        "tiers": {
            "device": _device_tier(options, found, layout, device),
            "host": _sized_tier(options.swap_space, slot_bytes(layout.block_bytes), layout),
            "storage": _sized_tier(
                options.storage_gib, layout.block_bytes + HEADER_BYTES, layout
            ),
        },
    }


def _survey(options: Namespace) -> ModelSurvey:
    """The survey of a folder, or of a model name: from the local cache, or from headers that
    the hub sends."""
    if not is_hub_name(options.model):
        return survey(Path(options.model), options.dtype)
    if (folder := cached_folder(options.model, options.revision)) is not None:
        return survey(folder, options.dtype)
    folder, tensors, num_files = remote_tensors(options.model, options.revision)
    return survey_of(folder, options.dtype, tensors, num_files)


def _check_sizes(options: Namespace) -> None:
    for flag in ("swap_space", "storage_gib", "device_gib"):
        size = getattr(options, flag)
        if size is not None and size < 0:
            raise ConfigError(
                f"--{flag.replace('_', '-')} must be a size in GiB that is not negative, got {size:g}"
            )
    if options.block_size < 1:
        raise ConfigError(f"--block-size must be at least 1, got {options.block_size}")


def _likely_device(options: Namespace) -> str:
    has_gpu = shutil.which("nvidia-smi") is not None
    return "cuda" if has_gpu or options.device_gib is not None else "cpu"


def _device_tier(
    options: Namespace, found: ModelSurvey, layout: KVLayout, device: str
) -> dict[str, Any]:
    """Blocks that fit beside the weights, or the reason why none fits."""
    if options.device_gib is not None:
        free = int(options.device_gib * _GIB)
    else:
        free = free_main_bytes() if device == "cpu" else _free_gpu_bytes(device)
    tier: dict[str, Any] = {"name": device, "free_bytes": free, "blocks": 0, "reason": None}
    try:
        tier["blocks"] = blocks_within(
            free - found.weight_bytes,
            device_type=device.partition(":")[0],
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            utilization=options.gpu_memory_utilization,
            step_bytes=found.step_shape().num_bytes(options.max_num_batched_tokens),
        )
    except ConfigError as exc:
        tier["reason"] = str(exc)
    tier["tokens"] = tier["blocks"] * layout.block_tokens
    return tier


def _free_gpu_bytes(device: str) -> int:
    """Free memory of a GPU, from nvidia-smi."""
    number = device.partition(":")[2] or "0"
    query = ["nvidia-smi", f"--id={number}", "--query-gpu=memory.free"]
    try:
        output = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True,
        ).stdout  # fmt: skip
        return int(output.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as exc:
        raise ConfigError(
            f"the free memory of {device} is not known here (nvidia-smi: {exc}); give --device-gib"
        ) from exc


def _sized_tier(gib: float, slot: int, layout: KVLayout) -> dict[str, Any] | None:
    if not gib:
        return None
    size = int(gib * _GIB)
    blocks = size // slot
    return {"bytes": size, "blocks": blocks, "tokens": blocks * layout.block_tokens}


def _lines(report: dict[str, Any]) -> list[str]:
    if not report["served"]:
        return [f"{'served':10}no: {report['reason']}"]
    weights, kv, tiers = report["weights"], report["kv"], report["tiers"]
    quantised = weights["quantization"] or "not quantised"
    shape = f"{kv['layers']} layers x {kv['planes']} planes x {kv['heads']} heads x "
    lines = [
        f"{'model':10}{report['model']} ({report['model_type']})",
        f"{'served':10}yes: by {_HOW[report['path']]}",
        (
            f"{'weights':10}{_gib(weights['bytes'])} in {report['dtype']}; "
            f"{weights['files']} files, {quantised}"
        ),
        (
            f"{'KV':10}{kv['token_bytes']:,} bytes per token ({shape}{kv['head_dim']} numbers x "
            f"{kv['element_bytes']} bytes)"
        ),
        f"{'':10}{kv['block_bytes'] / (1 << 20):.2f} MiB per block of {kv['block_tokens']} tokens",
        (
            f"{'context':10}{report['max_model_len']:,} tokens: "
            f"{_gib(report['max_model_len'] * kv['token_bytes'])} of KV"
        ),
        _device_line(tiers["device"]),
    ]
    for name in ("host", "storage"):
        if (tier := tiers[name]) is not None:
            held = f"{tier['blocks']:,} blocks, {tier['tokens']:,} tokens"
            lines.append(f"{name:10}{_gib(tier['bytes'])}: {held}")
    return lines


def _device_line(tier: dict[str, Any]) -> str:
    free = f"{tier['name']}, {_gib(tier['free_bytes'])} free"
    if tier["reason"] is not None:
        return f"{'device':10}{free}: {tier['reason']}"
    return f"{'device':10}{free}: {tier['blocks']:,} blocks, {tier['tokens']:,} tokens"


def _gib(num_bytes: int) -> str:
    if num_bytes < _GIB // 10:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / _GIB:.1f} GiB"
