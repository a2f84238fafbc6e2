"""Machines that this project measured, by their names on the command line."""

from dataclasses import replace

from headwater.errors import ConfigError
from headwater.replay.cost import LinkCost, Machine, StepCost

_H200_8B = Machine(
    name="h200-8b",
    note=(
        "H200 and the Llama-3.1-8B shape in bfloat16, by `headwater bench gpu`. Decoding: 238, "
        "5,841, 14,266 and 17,462 tokens/s at 1, 32, 128 and 256 rows of 1 k context; prompts: "
        "196 ms for 8 k tokens, 1,135 ms for 32 k; copies: 55 GB/s each way, which make steps "
        "1 and 3 % longer; direct file I/O: 1.8 and 1.1 GB/s. To peers: not measured, "
        "40 GB/s of a 400 Gb/s network"
    ),
    kv_token_bytes=32 * 2 * 8 * 128 * 2,
    step=StepCost(
        launch_s=0.4e-3,
        weights_s=3.75e-3,
        token_s=2.05e-5,
        pair_s=8.7e-10,
        row_s=5e-6,
        context_token_s=3.12e-8,
    ),
    links={
        "device_to_host": LinkCost(bytes_s=55e9, latency_s=2e-5, max_jobs=1, step_share=0.008),
        "host_to_device": LinkCost(bytes_s=55e9, latency_s=2e-5, max_jobs=1, step_share=0.032),
        "host_to_storage": LinkCost(bytes_s=1.1e9, latency_s=1e-3, max_jobs=2),
        "storage_to_host": LinkCost(bytes_s=1.8e9, latency_s=1e-3, max_jobs=2),
        "lookup": LinkCost(bytes_s=1e9, latency_s=5e-4, max_jobs=2),
        "peer": LinkCost(bytes_s=40e9, latency_s=5e-5),
    },
    device_gib=100.0,
    num_layers=32,
    state_bytes=4096 * 2,
)

_H200_MOE = Machine(
    name="h200-30b-a3b",
    note=(
        "H200 and the Qwen3-30B-A3B shape (128 experts, 8 for each token) in bfloat16, by "
        "`headwater bench gpu --parts moe`. Decoding: 349, 2,199 and 6,655 tokens/s at 1, 32 and "
        "128 rows of 1 k context; prompts: 194 ms for 8 k tokens, whose share of attention is "
        "computed from the 8B shape; links as in h200-8b"
    ),
    kv_token_bytes=48 * 2 * 4 * 128 * 2,
    step=StepCost(
        launch_s=0.4e-3,
        weights_s=1.6e-3,
        token_s=1.83e-5,
        pair_s=1.3e-9,
        row_s=7.4e-6,
        context_token_s=2.34e-8,
        experts_s=13.2e-3,
        expert_share=8 / 128,
    ),
    links=_H200_8B.links,
    device_gib=65.0,
)

_H200_MLA = Machine(
    name="h200-deepseek-v2-lite",
    note=(
        "H200 and the DeepSeek-V2-Lite shape (latent KV; 64 experts, 6 for each token) in "
        "bfloat16, by `headwater bench gpu --parts mla`. Decoding: 371, 3,098 and 9,854 tokens/s "
        "at 1, 32 and 128 rows of 1 k context; prompts: 406 ms for 8 k tokens, of which "
        "attention is estimated as 305 ms; links as in h200-8b"
    ),
    kv_token_bytes=27 * (512 + 64) * 2,
    step=StepCost(
        launch_s=0.4e-3,
        weights_s=1.53e-3,
        token_s=1.2e-5,
        pair_s=9.1e-9,
        row_s=1.66e-5,
        context_token_s=7.4e-9,
        experts_s=7.97e-3,
        expert_share=6 / 64,
    ),
    links=_H200_8B.links,
    device_gib=95.0,
)

_H200_FP8_KV = replace(
    _H200_8B,
    name="h200-8b-fp8-kv",
    note=(
        "h200-8b with --kv-cache-dtype fp8: one byte for each number and one for each token and "
        "head. Reading KV is computed from its bytes (the roofline), not measured; everything "
        "else as in h200-8b"
    ),
    kv_token_bytes=32 * 2 * 8 * (128 + 1),
    step=replace(_H200_8B.step, context_token_s=3.12e-8 * 129 / 256),
)

_CPU_100M = Machine(
    name="cpu-100m",
    note=(
        "~100 M weights in float32 on one of two cores of an AMD EPYC that others used too: "
        "32, 64 and 119 ms between tokens at 1, 8 and 32 rows; 2.2 s for a prompt of 1,024 "
        "tokens; file I/O 3.1 and 2.4 GB/s. To peers: not measured, 2 GB/s"
    ),
    kv_token_bytes=12 * 2 * 4 * 64 * 4,
    step=StepCost(
        launch_s=4e-3,
        weights_s=25e-3,
        token_s=7.7e-4,
        pair_s=2.7e-6,
        row_s=2.0e-3,
        context_token_s=5e-7,
    ),
    links={
        "device_to_host": LinkCost(bytes_s=4e9, latency_s=1e-4, max_jobs=1),
        "host_to_device": LinkCost(bytes_s=4e9, latency_s=1e-4, max_jobs=1),
        "host_to_storage": LinkCost(bytes_s=2.4e9, latency_s=1e-3, max_jobs=2),
        "storage_to_host": LinkCost(bytes_s=3.1e9, latency_s=1e-3, max_jobs=2),
        "lookup": LinkCost(bytes_s=1e9, latency_s=5e-4, max_jobs=2),
        "peer": LinkCost(bytes_s=2e9, latency_s=2e-4),
    },
    device_gib=2.0,
    num_layers=12,
    state_bytes=768 * 4,
    max_num_seqs=64,
    max_batched_tokens=2048,
)

PRESETS = {
    machine.name: machine
    for machine in (_H200_8B, _H200_FP8_KV, _H200_MOE, _H200_MLA, _CPU_100M)
}


def preset(name: str) -> Machine:
    """The machine of that name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown machine {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
