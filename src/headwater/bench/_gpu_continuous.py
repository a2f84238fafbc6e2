"""The same requests, all at once, to Headwater and to transformers' continuous batching."""

from typing import Any, NamedTuple

from headwater.bench import _gpu_peers as peers
from headwater.bench._gpu_engine import GpuEngine
from headwater.device.model import LoadedModel
from headwater.types import Tokens

CLIENTS = 128


class RequestMix(NamedTuple):
    """Requests of one kind."""

    prompt: int
    output: int


WORKLOADS = {"64_in_64_out": RequestMix(64, 64), "1k_in_32_out": RequestMix(1000, 32)}
"""One mix has almost no prompt; the other has the context of 1 k at which decode is
measured."""


def serve_ours(engine: GpuEngine) -> dict[str, peers.PeerThroughput]:
    """Serve every workload with the engine, whose kernels and graphs are ready."""
    found = {}
    for name, (prompt, output) in WORKLOADS.items():
        engine.serve(_prompts(engine, prompt, seed=10**8), max_tokens=4)
        served = engine.serve(_prompts(engine, prompt, seed=0), max_tokens=output)
        found[name] = peers.PeerThroughput(
            served.output_tokens / served.seconds,
            CLIENTS * len(served.steps_s) / sum(served.steps_s),
        )
    return found


def compare(
    model: LoadedModel, engine: GpuEngine, ours: dict[str, peers.PeerThroughput]
) -> dict[str, Any]:
    """Run transformers with its own settings after the engine's memory is free, and compute the
    ratios."""
    found = {}
    for name, (prompt, output) in WORKLOADS.items():
        inputs = [tokens.tolist() for tokens in _prompts(engine, prompt, seed=0)]
        theirs = peers.continuous_rates(model, inputs, output=output)
        found[name] = {
            "tokens_s": ours[name].tokens_s,
            "transformers_tokens_s": theirs.tokens_s,
            "ratio": ours[name].tokens_s / theirs.tokens_s,
            "decoding_tokens_s": ours[name].decoding_tokens_s,
            "transformers_decoding_tokens_s": theirs.decoding_tokens_s,
            "decoding_ratio": ours[name].decoding_tokens_s / theirs.decoding_tokens_s,
        }
    return found


def _prompts(engine: GpuEngine, length: int, *, seed: int) -> list[Tokens]:
    return [engine.prompt(length, seed + length * 1_000 + row) for row in range(CLIENTS)]
