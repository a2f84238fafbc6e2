"""Mixtures of experts, with latent KV or without: decode and prefill, as shares of the limits
of memory and tensor cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.bench._gpu_decode import OUTPUT, PROMPT, serve_batch
from headwater.bench._gpu_engine import GpuEngine, weight_bytes
from headwater.bench._gpu_rooflines import kv_tokens_read, pairs_attended
from headwater.device.gpu import moe
from headwater.device.gpu.packed_experts import PackedExperts, StoredExperts
from headwater.device.model import LoadedModel

_SKIPPED = 4
_PREFILL = 8192
_COUNTED_TOKENS = 32
"""Output tokens of the requests whose experts are counted: enough for all rows to decode
together even if their prompts are spread over several steps."""


def measure_moe(
    model: LoadedModel, engine: GpuEngine, batches: list[int], ceilings: dict[str, float]
) -> dict[str, Any]:
    """Measure decode at each batch size, where only the chosen experts are read, and a prompt
    of 8,192 tokens."""
    result: dict[str, Any] = {
        str(batch): _measure_decode(model, engine, batch, ceilings["memory_gb_s"])
        for batch in batches
    }
    result["prefill"] = _measure_prefill(model, engine, ceilings["product_tflop_s"])
    return result


def _measure_decode(
    model: LoadedModel, engine: GpuEngine, batch: int, ceiling_gb_s: float
) -> dict[str, float | None]:
    steps = np.array(serve_batch(engine, batch, seed=batch).steps_s[_SKIPPED:])
    step_ms = float(np.median(steps)) * 1e3
    found: dict[str, float | None] = {"tokens_s": batch / step_ms * 1e3, "step_ms": step_ms}
    touched = _touched_experts(engine, batch)
    if touched is None:
        return found | {"roofline_ms": None, "experts_touched": None, "share": None}
    per_expert, num_layers, num_experts = _expert_bytes(model)
    resting = weight_bytes(model) - per_expert * num_experts * num_layers
    context = PROMPT + OUTPUT // 2
    num_bytes = resting + per_expert * touched * num_layers
    num_bytes += batch * kv_tokens_read(model.module.config, context) * model.token_bytes
    roofline_ms = num_bytes / ceiling_gb_s / 1e6
    return found | {
        "roofline_ms": roofline_ms,
        "experts_touched": touched,
        "share": roofline_ms / step_ms,
    }


def _measure_prefill(
    model: LoadedModel, engine: GpuEngine, product_tflop_s: float
) -> dict[str, float]:
    taken = [
        engine.serve([engine.prompt(_PREFILL, seed=90 + n)], max_tokens=1).first_s[0]
        for n in range(4)
    ][1:]
    config: Any = model.module.config
    per_expert, num_layers, num_experts = _expert_bytes(model)
    width = model.dtype.itemsize
    head = config.vocab_size * config.hidden_size
    routed = per_expert * num_experts * num_layers / width
    resting = weight_bytes(model) / width - routed - head
    chosen = _expert_numbers(model) * config.num_experts_per_tok * num_layers
    heads = config.num_attention_heads * _attended_numbers(model)
    flop = 2 * _PREFILL * (resting + chosen)
    flop += 4 * pairs_attended(config, _PREFILL) * heads
    bound_ms = flop / product_tflop_s / 1e9
    seconds = median(taken)
    return {
        "tokens_s": _PREFILL / seconds,
        "first_token_ms": seconds * 1e3,
        "bound_ms": bound_ms,
        "share": bound_ms / seconds / 1e3,
    }


def _attended_numbers(model: LoadedModel) -> float:
    """Mean of the key size and the value size of a head. For latent KV these are the sizes of
    the keys and values that a latent expands to."""
    config: Any = model.module.config
    if model.value_dim is None:
        return model.head_dim
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    return float(key + config.v_head_dim) / 2


def _expert_bytes(model: LoadedModel) -> tuple[int, int, int]:
    """Bytes of one expert, number of layers with experts, and number of experts in a layer."""
    found = [
        module.experts
        for module in model.module.modules()
        if isinstance(getattr(module, "experts", None), StoredExperts)
        or hasattr(getattr(module, "experts", None), "down_proj")
    ]
    first: Any = found[0]
    if isinstance(first, StoredExperts):
        experts = len(first.down.codes)
        return first.packed_bytes // experts, len(found), experts
    experts = len(first.down_proj)
    whole = first.gate_up_proj.nbytes + first.down_proj.nbytes
    return whole // experts, len(found), experts


def _expert_numbers(model: LoadedModel) -> int:
    """Weights of one expert, which are as many products per token however they are stored."""
    per_expert, _, _ = _expert_bytes(model)
    for module in model.module.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, StoredExperts):
            in_byte = 2 if isinstance(experts, PackedExperts) else 1
            codes = (experts.gate_up.codes, experts.down.codes)
            return sum(in_byte * part[0].numel() for part in codes)
    return per_expert // model.dtype.itemsize


def _touched_experts(engine: GpuEngine, batch: int) -> float | None:
    """Average number of experts of a layer that a decode step of `batch` rows reads; None if no
    such step was computed.

    Counted in steps outside graphs, where the choice of experts can be read.
    """
    # Prompts are cached, so that all rows decode together. A single prompt is not cached,
    # because the few uncached tokens of a cached one would run in a captured graph.
    graphs, engine.runner.graphs = engine.runner.graphs, None
    with _recorded(batch) as counts:
        serve_batch(engine, batch, seed=batch if batch > 1 else 501, max_tokens=_COUNTED_TOKENS)
    engine.runner.graphs = graphs
    return float(np.mean([int(count) for count in counts])) if counts else None


@contextmanager
def _recorded(batch: int) -> Iterator[list[Tensor]]:
    """Collects the number of distinct experts per layer, in steps of `batch` rows."""
    counts: list[Tensor] = []
    watched: Any = moe
    choose, normalise_and_choose = watched.choose_experts, watched.normalise_and_choose

    def count(ids: Tensor) -> None:
        if len(ids) == batch:
            counts.append(torch.tensor(torch.unique(ids).numel()))

    def chosen(*given: Any) -> Any:  # noqa: ANN401 -- as the kernels' own
        ids, weights = choose(*given)
        count(ids)
        return ids, weights

    def normalised_and_chosen(*given: Any) -> Any:  # noqa: ANN401
        x, ids, weights = normalise_and_choose(*given)
        count(ids)
        return x, ids, weights

    watched.choose_experts, watched.normalise_and_choose = chosen, normalised_and_chosen
    try:
        yield counts
    finally:
        watched.choose_experts, watched.normalise_and_choose = choose, normalise_and_choose
