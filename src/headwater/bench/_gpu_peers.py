"""transformers' own code on the same weights in the same run: what the figures are compared to."""

from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from headwater.bench._gpu_ceilings import time_ms
from headwater.bench._gpu_engine import DEVICE
from headwater.clock import SystemClock
from headwater.device.attention.base import ATTENTION
from headwater.device.model import LoadedModel
from headwater.errors import InvariantError


@contextmanager
def _own_attention(model: LoadedModel, *, threads: bool = False) -> Any:  # noqa: ANN401
    """The model with transformers' attention. Set `threads` for a call that starts threads of its
    own: inference mode would hold in the calling thread only."""
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    try:
        with torch.no_grad() if threads else torch.inference_mode():
            yield module
    finally:
        module.set_attn_implementation(ATTENTION)


def prefill_s(model: LoadedModel, num_tokens: int) -> float:
    """Time to compute one prompt with SDPA and the model's own cache, with the logits of the
    last token."""
    tokens = torch.randint(0, model.vocab_size, (1, num_tokens), device=DEVICE)
    with _own_attention(model) as module:
        return time_ms(lambda: module(tokens, use_cache=True, logits_to_keep=1), 3) / 1e3


def generate_tokens_s(model: LoadedModel, batch: int, *, prompt: int, output: int) -> float:
    """Tokens per second of `generate` after the prompts, from the times of two output
    lengths."""
    tokens = torch.randint(0, model.vocab_size, (batch, prompt), device=DEVICE)
    clock = SystemClock()
    with _own_attention(model) as module:

        def run(count: int) -> float:
            began_s = clock.now()
            module.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            torch.cuda.synchronize()
            return clock.now() - began_s

        run(2)
        return batch * output / (run(output + 1) - run(1))


class PeerThroughput(NamedTuple):
    """Output tokens per second of some requests that came all at once."""

    tokens_s: float
    """Tokens per second from the first request to the last token, prompts included."""

    decoding_tokens_s: float
    """Tokens per second while all requests were decoding."""


def continuous_rates(
    model: LoadedModel, inputs: list[list[int]], *, output: int
) -> PeerThroughput:
    """Rates of `generate_batch`, with the settings it chooses itself."""
    settings = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    clock = SystemClock()
    with _own_attention(model, threads=True) as module:
        began_s = clock.now()
        outputs = module.generate_batch(
            inputs=inputs, generation_config=settings, record_timestamps=True
        )
        seconds = clock.now() - began_s
    times_s = [one.timestamps for one in outputs.values()]
    generated = sum(map(len, times_s))
    if generated < len(inputs) * output:
        raise InvariantError(f"transformers generated {generated} tokens")
    all_began_s = max(times[0] for times in times_s)
    first_ended_s = min(times[-1] for times in times_s)
    together = sum(all_began_s < at <= first_ended_s for times in times_s for at in times)
    return PeerThroughput(
        generated / seconds, together / max(first_ended_s - all_began_s, 1e-9)
    )
