"""Default limits of a step, chosen from the device and the model."""

from typing import NamedTuple

from headwater.config import CPU_NUM_SEQS, CPU_STEP_TOKENS, EngineConfig
from headwater.errors import ConfigError

_GIB = 1 << 30

PREFILL_TOKENS = 512
"""Tokens per step of a prefill instance on a CPU. Longer steps are not faster per token there, and
requests that arrive during a step wait for its end."""

_MAX_GPU_SEQS = 1024
_MIN_GPU_SEQS = 16
_TOKENS_PER_SEQ = 512
"""KV tokens of the pool per sequence of a step. More sequences would not fit."""

_GPU_STEP_TOKENS = ((24 * _GIB, 8192), (8 * _GIB, 4096), (0, 2048))
"""From this much free memory of a GPU on, a step has this many tokens. Long prompts are
computed fastest in large steps; the target for the time between tokens bounds steps with
decodes."""


class StepLimits(NamedTuple):
    """The largest step."""

    max_num_seqs: int
    max_batched_tokens: int
    is_chosen: bool
    """Whether at least one of them was chosen here and not by the operator."""


def choose_limits(
    config: EngineConfig, *, device_type: str, free_bytes: int, token_bytes: int
) -> StepLimits:
    """The limits that the operator gave, otherwise those that suit the device. `free_bytes` are
    left beside the weights, `token_bytes` is the KV of one token."""
    is_cpu = device_type == "cpu"
    num_seqs, num_tokens = config.max_num_seqs, config.max_batched_tokens
    if num_seqs is None:
        num_seqs = CPU_NUM_SEQS if is_cpu else _gpu_seqs(free_bytes // token_bytes)
        if num_tokens is not None:
            num_seqs = min(num_seqs, num_tokens)
    if num_tokens is None:
        is_prefill = config.peers is not None and config.peers.role == "prefill"
        num_tokens = CPU_STEP_TOKENS
        if not is_cpu:
            num_tokens = next(
                tokens for least, tokens in _GPU_STEP_TOKENS if free_bytes >= least
            )
        elif is_prefill:
            num_tokens = PREFILL_TOKENS
        num_tokens = max(num_tokens, num_seqs)
    if num_tokens < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {num_tokens} cannot hold one token for each of "
            f"--max-num-seqs {num_seqs} sequences; raise the first or lower the second"
        )
    is_chosen = config.max_num_seqs is None or config.max_batched_tokens is None
    return StepLimits(num_seqs, num_tokens, is_chosen)


def _gpu_seqs(pool_tokens: int) -> int:
    wanted = min(max(pool_tokens // _TOKENS_PER_SEQ, _MIN_GPU_SEQS), _MAX_GPU_SEQS)
    return 1 << (wanted.bit_length() - 1)
