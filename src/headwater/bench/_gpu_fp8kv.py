"""8-bit KV on the GPU compared with bfloat16: capacity, decode speed, a hit on the host, and the
difference of the results."""

from dataclasses import replace
from statistics import median
from typing import Any

import torch

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine, make_model, release_memory
from headwater.bench._gpu_steps import all_logits, decode_ms, make_runner, prefill_ms
from headwater.device.model import LoadedModel

_ROWS, _CONTEXT = 96, 8192
_LONG = 32_768
_PROMPT = 8192
_COMPARED_TOKENS = 2048


def measure_fp8_kv(model: LoadedModel, *, is_quick: bool) -> dict[str, Any]:
    """Measure each figure with 8-bit and with bfloat16 KV, and compute the ratios."""
    found: dict[str, Any] = {}
    rows = 16 if is_quick else _ROWS
    for name, each in (("bfloat16", model), ("fp8", replace(model, has_fp8_kv=True))):
        runner = make_runner(each, rows=rows, tokens=rows * (_CONTEXT + 64))
        found[name] = {
            "token_bytes": each.token_bytes,
            f"decode_{rows}x{_CONTEXT}_ms": decode_ms(runner, rows, _CONTEXT),
            "decode_1x1024_ms": decode_ms(runner, 1, 1024),
            f"prefill_{_PROMPT}_ms": prefill_ms(runner, _PROMPT),
        }
        runner.close()
        del runner
        release_memory()
        found[name] |= _host_hit(each)
        release_memory()
    plain, small = found["bfloat16"], found["fp8"]
    found["ratio"] = {name: plain[name] / small[name] for name in plain}
    found |= _differences(model)
    return found


def measure_fp8_latents(shape: str, found: dict[str, Any]) -> None:
    """Measure latent KV in 8 bits and in bfloat16, and put the ratios into `found`."""
    model = make_model(shape)
    for name, each in (("bfloat16", model), ("fp8", replace(model, has_fp8_kv=True))):
        runner = make_runner(each, rows=_ROWS, tokens=_ROWS * (_CONTEXT + 64))
        found[name] = {
            "token_bytes": each.token_bytes,
            f"decode_{_ROWS}x{_CONTEXT}_ms": decode_ms(runner, _ROWS, _CONTEXT),
            f"decode_1x{_LONG}_ms": decode_ms(runner, 1, _LONG),
            f"prefill_{_PROMPT}_ms": prefill_ms(runner, _PROMPT),
        }
        runner.close()
        del runner
        release_memory()
    plain, small = found["bfloat16"], found["fp8"]
    found["ratio"] = {name: plain[name] / small[name] for name in plain}
    found |= _differences(model)


def _host_hit(model: LoadedModel) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of 32 k tokens: computed, and found on the
    host."""
    blocks = _LONG // BLOCK_TOKENS
    engine = GpuEngine(
        model,
        num_blocks=2 * blocks + 64,
        host_blocks=blocks + 64,
        max_num_seqs=8,
        max_batched_tokens=_LONG,
        write_policy="write_through",
        load_policy="wait",
    )
    engine.await_pinned()
    prompt = engine.prompt(_LONG, seed=1)
    computed = [engine.serve([prompt], max_tokens=1).first_s[0] * 1e3]
    engine.drain()
    taken = []
    for _ in range(4):
        engine.clear_device()
        served = engine.serve([prompt], max_tokens=1)
        assert served.found["host"] >= _LONG - BLOCK_TOKENS, (
            f"the prompt was not found on the host: {served.found}"
        )
        taken.append(served.first_s[0] * 1e3)
    engine.close()
    return {"computed_32k_ms": computed[0], "host_hit_32k_ms": median(taken[1:])}


def _differences(model: LoadedModel) -> dict[str, float]:
    """Differences of next-token distributions over the same tokens, with 8-bit KV and without."""
    tokens = torch.randint(0, model.vocab_size, (_COMPARED_TOKENS,)).tolist()
    logs = []
    for each in (model, replace(model, has_fp8_kv=True)):
        runner = make_runner(each, rows=1, tokens=2 * len(tokens))
        logs.append(all_logits(runner, tokens).float().log_softmax(-1))
        runner.close()
    exact, rounded = logs
    # Text the model would write itself: one token drawn from each distribution.
    drawn = torch.multinomial(exact.exp(), 1)
    change = (exact.gather(1, drawn) - rounded.gather(1, drawn)).mean().exp()
    kl = (exact.exp() * (exact - rounded)).sum(-1)
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "perplexity_ratio": float(change),
        "greedy_agreement": float((exact.argmax(-1) == rounded.argmax(-1)).float().mean()),
    }
