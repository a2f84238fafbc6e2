"""What a client asks for, and what the scheduler reports about it.

Input: `SamplingParams` and `Request`. Output: `SequenceOutput`, with `Usage` and
`TokenLogprobs`.

Values are validated here, because callers such as library users may not use a type checker.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import get_args

from headwater.cache import Hint
from headwater.errors import PromptTooLong, RequestError
from headwater.types import LoadPolicy, RequestId, Tokens

BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logit_bias": (-100.0, 100.0),
}
"""Smallest and largest value of each number; `top_p` must be larger than its smallest value."""

LEAST_TEMPERATURE = 0.001
"""Lower temperatures are greedy: dividing logits by almost zero overflows."""

MAX_LOAD_TIMEOUT_S = 3600.0
"""Longest wait for lower tiers that a request may ask for."""

MAX_RETURNS_IN_S = 3600.0
"""Longest time in which a session can be announced to return; a later return is not worth a
hint."""

_LEAST_COUNTS = (
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("top_k", 0),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop choosing.

    Raises RequestError, naming the field, for a value no engine can work with.
    """

    max_tokens: int = 16
    """Maximum number of tokens to generate."""

    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens."""

    temperature: float = 1.0
    """0 or nearly 0 is greedy: the most likely token is always chosen."""

    top_p: float = 1.0
    top_k: int = 0
    """Choose among the k most likely tokens; 0 means all."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Randomness depends only on this seed and the position of the token. The default makes
    library calls repeatable; the server draws a seed for a request without one."""

    logprobs: int | None = None
    """Number of alternatives to report for each sampled token; None reports nothing."""

    prompt_logprobs: int | None = None
    """The same for prompt tokens. The whole prompt is then computed; None reports nothing."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output; the model's end-of-sequence ids are added unless ignored."""

    ignore_eos: bool = False
    grammar: str = ""
    """The grammar of the output, in llguidance's format; empty allows everything. The output
    ends where the grammar allows nothing more, whatever `min_tokens` and `ignore_eos` say."""

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in BOUNDS:
            if name != "logit_bias":
                _check_bounds(name, getattr(self, name))
        for amount in self.logit_bias.values():
            _check_bounds("logit_bias", amount)
        if self.top_p == 0.0:
            raise RequestError(f"top_p must be more than 0, got {self.top_p}")
        for name, least in _LEAST_COUNTS:
            count = getattr(self, name)
            if count is not None and count < least:
                raise RequestError(f"{name} must be at least {least}, got {count}")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}; lower min_tokens"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, instead of a random one."""
        return self.temperature < LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a client asked for, as token ids. Nothing in the engine ever changes it."""

    request_id: RequestId
    tokens: Tokens
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    """Lower values run first, under the `priority` policy."""

    cache_salt: str = ""
    """Requests share cached blocks only with requests of the same salt."""

    session_id: str = ""
    """The client's name for its session; empty if it gave none."""

    cache_hint: Hint | None = None
    """What the client says about the session after this request."""

    load_policy: LoadPolicy | None = None
    """Overrides the server's load policy; None uses the server's."""

    load_timeout_s: float | None = None
    """Overrides the server's longest wait for lower tiers."""

    prefill: str = ""
    """Address of the instance that computes the prompt; empty computes it here."""

    local_fallback: bool = True
    """Whether the prompt is computed here when that instance refuses; otherwise the request is
    declined."""

    can_return: bool = False
    """Whether the caller can continue the request on another instance if it is preempted and
    waits too long to resume."""

    num_resumed_tokens: int = 0
    """How many of the last `tokens` are resumed output, sampled on another instance. They count
    as output for penalties and lengths."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_resumed_tokens <= len(self.tokens):
            raise RequestError(
                f"num_resumed_tokens must be between 0 and the {len(self.tokens)} tokens of the "
                f"request, got {self.num_resumed_tokens}"
            )
        if self.cache_hint is not None:
            _check_hint(self.cache_hint, self.session_id)
        if self.load_policy is not None and self.load_policy not in get_args(LoadPolicy):
            raise RequestError(
                f"load_policy must be one of {', '.join(get_args(LoadPolicy))}; got {self.load_policy!r}"
            )
        wait_s = self.load_timeout_s
        if wait_s is not None and not 0.0 <= wait_s <= MAX_LOAD_TIMEOUT_S:
            raise RequestError(
                f"load_timeout_s must be between 0 and {MAX_LOAD_TIMEOUT_S:g}, got {wait_s}"
            )


def _check_hint(hint: Hint, session_id: str) -> None:
    if not session_id:
        raise RequestError("cache_hint applies to a session; give session_id with it")
    in_s = hint.returns_in_s
    if in_s is not None and not 0.0 <= in_s <= MAX_RETURNS_IN_S:
        raise RequestError(
            f"returns_in_s must be between 0 and {MAX_RETURNS_IN_S:g}, got {in_s}"
        )


def length_end(request: Request, max_model_len: int) -> int:
    """The number of tokens at which `request` reaches its length. Raises RequestError if there
    is no room for one output token."""
    num_tokens = len(request.tokens)
    if num_tokens == 0:
        raise RequestError("the prompt is empty; give at least one token")
    if num_tokens >= max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens; the limit is {max_model_len} including at least "
            "one output token. Shorten the prompt"
        )
    if request.num_resumed_tokens >= request.params.max_tokens:
        raise RequestError(
            f"the request resumes after {request.num_resumed_tokens} output tokens, and max_tokens "
            f"is {request.params.max_tokens}; raise max_tokens"
        )
    return min(
        num_tokens - request.num_resumed_tokens + request.params.max_tokens, max_model_len
    )


def _check_bounds(name: str, value: float) -> None:
    """Raise RequestError for a number outside its bounds. NaN is refused too, because it
    compares false with both bounds."""
    least, most = BOUNDS[name]
    if not least <= value <= most:
        raise RequestError(f"{name} must be between {least:g} and {most:g}, got {value}")


def is_whole(value: object) -> bool:
    """Whether this is an integer of Python or numpy; booleans are not."""
    kind = type(value)
    return kind is int or (kind is not bool and isinstance(value, Integral))


def _is_number(value: object) -> bool:
    """Whether this is a comparable number; booleans are not."""
    kind = type(value)
    return kind is float or kind is int or (kind is not bool and isinstance(value, Real))


def _is_whole_or_none(value: object) -> bool:
    return value is None or is_whole(value)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        is_whole(token) and _is_number(amount) for token, amount in value.items()
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(is_whole(token) for token in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


_Kind = tuple[Callable[[object], bool], str]
_WHOLE: _Kind = (is_whole, "a whole number")
_NUMBER: _Kind = (_is_number, "a number")

_KINDS: Mapping[str, _Kind] = {
    "max_tokens": _WHOLE,
    "min_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": (_is_bias, "numbers by token id"),
    "seed": _WHOLE,
    "logprobs": (_is_whole_or_none, "a whole number or None"),
    "prompt_logprobs": (_is_whole_or_none, "a whole number or None"),
    "stop_token_ids": (_are_ids, "a tuple of token ids"),
    "ignore_eos": (_is_bool, "True or False"),
    "grammar": (_is_text, "a text"),
}


def _check_kinds(params: object) -> None:
    """Raise RequestError, naming the field, for the first value of a wrong type."""
    for name, (is_kind, words) in _KINDS.items():
        value = getattr(params, name)
        if not is_kind(value):
            raise RequestError(
                f"{name} must be {words}, got {type(value).__name__} {value!r:.40}"
            )


SEED_RANGE = 1 << 63
"""Seeds are below this."""


def _seed_of_choice(seed: int, choice: int) -> int:
    """A different seed for each choice of a request, the same one each time."""
    return (seed + choice) % SEED_RANGE


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The sampling parameters of the `choice`-th answer. The first answer uses them
    unchanged."""
    if choice == 0:
        return params
    return replace(params, seed=_seed_of_choice(params.seed, choice))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadUsage:
    """The decision about blocks found below the device, and its result."""

    choice: str
    """`load_cheaper`, `split`, `recompute_cheaper`, `unmeasured`, `policy_…`, or `none`."""

    host_blocks: int
    """Blocks on the host when the decision was made; `storage_blocks` follow them in
    storage."""

    storage_blocks: int
    num_blocks: int
    """Leading blocks to load; 0 computes all of them."""

    load_s: float | None
    """Expected seconds of the load; None if nothing was measured."""

    recompute_s: float | None
    """Expected seconds to compute all of them."""

    chosen_s: float | None
    """Expected seconds of the decision; for a split, to load the head and compute the tail."""

    waited_s: float
    """How long the request waited for the load alone."""

    shortfall: str | None
    """Why fewer blocks arrived than were chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How much of a prompt was cached. Fixed when the request is first admitted; a later
    preemption does not change it."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, because their blocks were cached."""

    by_tier: Mapping[str, int] = field(default_factory=dict)
    """`cached_tokens` by where the blocks were: device, host, storage, peer."""

    computed: int
    """Prompt tokens that were computed."""

    miss_reason: str | None = None
    """Why the match ended; None if everything that can be found was found."""

    queued_s: float = 0.0
    """Seconds from the request's arrival to its admission."""

    load: LoadUsage | None = None
    """Set if lower tiers had blocks or were asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature and penalties."""

    chosen: float
    rank: int
    """1 for the most likely token."""

    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence. Not modified after it is built.

    Neither frozen nor keyword-only, because one is built for each sequence in each step, and
    that would take four times as long.
    """

    request_id: RequestId
    tokens: list[int]
    """Tokens sampled since the last output, including a stop token."""

    logprobs: list[TokenLogprobs | None]
    """One entry per token; None if none were requested."""

    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `refused`, `returned` or `failed` on the last output, None
    before."""

    stop_token: int | None = None
    """The token that ended the output, if a token did."""

    usage: Usage | None = None
    """Usage of the prompt; only on the first output with tokens."""

    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of prompt tokens from the second on; only on the first output with
    tokens."""

    detail: str = ""
    """The reason, if the request was refused or failed."""
