"""Made-up results of every part of `headwater bench gpu`, in the form the parts give them."""

from typing import Any


def _decode(**more: float) -> dict[str, Any]:
    each = {"tokens_s": 238.0, "step_ms": 4.2, "step_p50_ms": 4.2, "step_p99_ms": 4.3}
    return {**each, "roofline_ms": 3.6, "roofline_tokens_s": 277.0, "share": 0.87, **more}


def _experts() -> dict[str, Any]:
    touched = {"experts_touched": 8.0}
    prefill = {"tokens_s": 4e4, "first_token_ms": 190.0, "bound_ms": 92.0, "share": 0.47}
    batches = {batch: _decode(**touched) for batch in ("1", "32", "128")}
    return {**batches, "prefill": prefill, "is_fused": True, "kv_token_bytes": 31104}


def _beside(what: str) -> dict[str, float]:
    found = {}
    for which in ("p50", "p99"):
        found[f"step_{which}_ms"] = 5.7
        found[f"step_{which}_ms_with_{what}"] = 5.9
        found[f"{which}_ratio"] = 1.03
    return found


def _copy() -> dict[str, Any]:
    rates = {"gb_s": 55.0, "ceiling_gb_s": 55.3, "share": 0.995, "gb_s_under_decode": 41.0}
    return {**rates, **_beside("copies"), "on_device": _beside("copies")}


def _link() -> dict[str, Any]:
    pace = {"steps": 90, "chunks": 8, "gb_s": 3.8, **_beside("blocks")}
    return {
        "ms": 3.0,
        "gb_s": 1438.6,
        "share": 0.68,
        "best_ms": 2.9,
        "paced": pace,
        "unpaced": pace,
    }


def _load() -> dict[str, float]:
    return {
        "tokens_s": 18329.0,
        "events_s": 18000.0,
        "events_of_tokens": 0.99,
        "first_token_p50_ms": 52.0,
        "first_token_p99_ms": 93.0,
        "itl_p50_ms": 6.1,
        "itl_p99_ms": 25.8,
        "seconds": 3.5,
    }


def _server() -> dict[str, Any]:
    return {"ready_s": 20.0, "waves": [_load(), _load()], "compilations_after_ready": 0.0}


def _steps() -> dict[str, float]:
    return {
        "decode_1x1024_ms": 4.2,
        "decode_128x200_ms": 6.1,
        "decode_128x1024_ms": 9.0,
        "prefill_8192_ms": 199.9,
    }


def _method() -> dict[str, Any]:
    speedup = dict.fromkeys(_steps(), 1.7)
    return {
        **_steps(),
        "speedup": speedup,
        "logits_relative_error": 0.02,
        "greedy_agreement": 0.9,
    }


def _kv() -> dict[str, float]:
    return {
        "token_bytes": 131072,
        "decode_96x8192_ms": 27.4,
        "decode_1x1024_ms": 4.2,
        "decode_1x32768_ms": 5.2,
        "prefill_8192_ms": 198.0,
        "computed_32k_ms": 1132.0,
        "host_hit_32k_ms": 83.0,
    }


_KINDS = (
    "greedy",
    "temperature_top_p",
    "top_k_repetition",
    "min_p",
    "seed",
    "top_k_top_p",
    "logprobs_5",
    "one_row_of_each",
)
_CLIENTS = ("128", "512", "1024")
_RATIOS = (
    "p50_over_without_host",
    "p50_over_second_wave",
    "p99_over_without_host",
    "p99_over_second_wave",
)
_MIX = {
    "tokens_s": 22509.0,
    "transformers_tokens_s": 1531.0,
    "ratio": 14.7,
    "decoding_tokens_s": 14205.0,
    "transformers_decoding_tokens_s": 437.0,
    "decoding_ratio": 32.5,
}
_TRACE = {
    "output_tokens_s": 814.0,
    "prompt_tokens_s": 31872.0,
    "first_token_p50_ms": 159.0,
    "first_token_p99_ms": 2889.0,
    "device_hits": 0.039,
    "host_hits": 0.017,
    "preemptions": 0,
}
_STREAM = {
    "step_ms": 6.11,
    "step_p99_ms": 6.78,
    "roofline_ms": 4.6,
    "share": 0.85,
    "closed_loop_tokens_s": 19000.0,
}
_ROUND = {
    "cached": [0.0, 0.88, 0.9, 0.91],
    "first_token_p50_ms": [90.0] * 4,
    "turn_s": [9.0] * 4,
}

SAMPLE: dict[str, dict[str, Any]] = {
    "copies": {"device_to_host": _copy(), "host_to_device": _copy(), "batch": 128},
    "handoff": {
        "links": {link: _link() for link in ("cuda", "shm", "tcp")},
        "first": {
            link: {"local_ms": 1156.0, "handed_off_ms": 1168.0, "added_ms": 12.0}
            for link in ("cuda", "shm", "tcp")
        },
        "ceilings": {"device_copy_gb_s": 2100.0},
    },
    "decode": {
        **{batch: _decode() for batch in ("1", "32", "128", "256")},
        "transformers_generate_tokens_s": {"1": 18.0, "32": 561.0},
        "continuous_128": {"64_in_64_out": _MIX, "1k_in_32_out": _MIX},
    },
    "prefill": {
        length: {"tokens_s": 41703.0, "transformers_tokens_s": 32430.0, "ratio": 1.29}
        for length in ("2048", "8192", "32768")
    },
    "first_token": {
        "transformers_ms": 1376.0,
        "recomputed_ms": 1119.0,
        "device_ms": 7.5,
        "host_ms": 82.6,
        "file_ms": 2312.0,
        "file_found_tokens": 32704,
        "ceiling_ms": 77.3,
        "host_over_ceiling": 1.07,
        "transformers_over_host": 16.7,
    },
    "start": {
        "first_token_s": 0.4,
        "pinned_then": 0.07,
        "first_blocks_saved_s": 0.7,
        "pinned_s": 7.2,
    },
    "all_miss": {
        "loss": -0.0005,
        "loss_low": -0.0013,
        "loss_high": 0.0003,
        "pairs": 6,
        "written_gb": 90.2,
    },
    "trace": {
        "requests": 160,
        "scale": 4,
        "clients": 32,
        "without_host": _TRACE,
        "with_host": _TRACE,
    },
    "sampling": {
        rows: {kind: {"step_ms": 6.4, "of_greedy": 0.985} for kind in _KINDS}
        for rows in ("128", "512")
    },
    "moe": {shape: _experts() for shape in ("qwen3-30b-a3b", "qwen3-30b-a3b-12")},
    "mla": {shape: _experts() for shape in ("deepseek-v2-lite", "deepseek-v2-lite-9")},
    "families": {
        shape: {"1": _decode(), "32": _decode(), "is_fused": True}
        for shape in ("gemma-3-4b", "phi-4-mini", "olmo-2-7b", "1b")
    },
    "streams": dict.fromkeys(_CLIENTS, _STREAM),
    "json": {
        "free": {"tokens_s": 18000.0, "step_ms": 6.4},
        "bound": {"tokens_s": 17000.0, "step_ms": 6.8},
        "bound_of_free": 0.944,
    },
    "model_files": {"gib": 15.0},
    "http": {
        **_server(),
        **{f"greedy_{count}": _load() for count in _CLIENTS},
        **{
            f"together_{count}": {"itl_p50_ms": 6.1, "itl_p99_ms": 7.0, "p99_of_p50": 1.15}
            for count in _CLIENTS
        },
        **{
            f"{kind}_128": _load()
            for kind in ("temperature_top_p", "top_k_repetition", "logprobs_5")
        },
    },
    "mixed": {"adaptive": _load(), "fixed_2048": _load(), "adaptive_of_best_fixed": 0.97},
    "first_wave": {
        **{name: _server() for name in ("new_machine", "with_host", "without_host")},
        **{f"{prefix}{ratio}": 1.05 for prefix in ("", "new_machine_") for ratio in _RATIOS},
    },
    "sessions": {
        "possible": [0.89, 0.90, 0.91],
        "rounds": [{"with_host": _ROUND, "without_host": _ROUND}] * 3,
        "least_of_possible": 0.99,
        "time_ratio": 0.3,
        "time_ratio_highest": 0.36,
        "time_ratios": [0.27, 0.3, 0.36],
    },
    "quant": {
        "bfloat16": _steps(),
        "output_layer": "bfloat16",
        **{method: _method() for method in ("fp8_channel", "int4", "fp8_block")},
    },
    "mxfp4": _experts(),
    "fp8moe": {method: _experts() for method in ("fp8_block", "fp8_channel")},
    "fp8mla": {
        "bfloat16": _kv(),
        "fp8": _kv(),
        "ratio": dict.fromkeys(_kv(), 1.9),
        "kl_mean": 0.085,
    },
    "fp8kv": {
        "bfloat16": _kv(),
        "fp8": _kv(),
        "ratio": dict.fromkeys(_kv(), 1.9),
        "kl_mean": 0.085,
        "kl_max": 0.154,
        "perplexity_ratio": 1.09,
        "greedy_agreement": 0.4,
    },
    "kernels": {
        "flashinfer": "0.6.0",
        "decode_1x1024": {
            "ours_ms": 0.011,
            "gb_s": 400.0,
            "cuda_cores_ms": 0.013,
            "ratio": 1.18,
        },
        "flashinfer_first_call_s": {"cuda_cores": 60.0},
        "failed": [],
        "lowest_ratio": 1.04,
    },
}
