"""What was asked: `SamplingParams` and `Request`, both frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.types import RequestId, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop choosing."""

    max_tokens: int = 16
    """Most tokens to generate."""

    min_tokens: int = 0
    """No end-of-sequence or stop token is chosen before this many."""

    temperature: float = 1.0
    """0 is greedy: the most likely token, always."""

    top_p: float = 1.0
    top_k: int = 0
    """Choose among the k most likely; 0 is all."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Randomness is a function of this and the token's position, and of nothing else."""

    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; the model's end-of-sequence ids are added unless ignored."""

    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a client asked for, as token ids. Nothing in the engine ever changes it."""

    request_id: RequestId
    tokens: Tokens
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    """Lower runs first, under the `priority` policy."""

    cache_salt: str = ""
    """Requests share cached blocks only with requests of the same salt."""
