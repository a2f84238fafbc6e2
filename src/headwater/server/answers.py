"""The response bodies of the OpenAI API."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from headwater.scheduler.request import Usage


class LoadDetails(Struct, kw_only=True):
    """The choice between loading and recomputing blocks of lower tiers, with its costs."""

    choice: str
    host_blocks: int
    """Blocks found on the host at the time of the choice."""

    storage_blocks: int
    num_blocks: int
    """Leading blocks to load; 0 recomputes all of them."""

    load_s: float | None
    """Expected load time; null before anything was measured."""

    recompute_s: float | None
    chosen_s: float | None
    waited_s: float
    """Time the request waited only for this load."""

    shortfall: str | None
    """Why fewer blocks arrived than were chosen."""


class CacheDetails(Struct, kw_only=True):
    """Source of the prompt's tokens by tier, and the reason of the first miss."""

    device: int
    host: int
    storage: int
    peer: int
    recomputed: int
    miss_reason: str | None
    block_tokens: int
    """Tokens per block. Only whole blocks hit, so this is the shortest prefix that can hit."""

    queued_s: float
    """Time from arrival to admission; the longest one of several prompts."""

    loaded_bytes: int
    """KV bytes loaded from lower tiers or peers."""

    load: LoadDetails | None
    """The load decision of the first prompt with a lower-tier match or lookup."""


class PromptTokensDetails(Struct, kw_only=True):
    """Where the prompt's tokens came from. `cached_tokens` is always present, 0 when nothing
    hit."""

    cached_tokens: int
    cache: CacheDetails | UnsetType = UNSET


class CompletionTokensDetails(Struct, kw_only=True):
    """What the output tokens were used for."""

    reasoning_tokens: int = 0


class UsageAnswer(Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(Struct, kw_only=True):
    """One token of the prompt, or an alternative to it."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, log-probabilities by token id; null for the first token, which
has no prediction."""


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities of the completions API: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """A whole response, or one chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageAnswer | None = None


class TopLogprob(Struct, kw_only=True):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The chosen token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log-probabilities of the chat API."""

    content: list[TokenLogprob]


class FunctionCall(Struct, kw_only=True):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ChatToolCall(Struct, kw_only=True):
    """A call that the model made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(Struct, kw_only=True):
    """The generated message."""

    content: str | None
    """Null if there are only calls."""

    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same as `reasoning_content`."""

    malformed_tool_calls: int | UnsetType = UNSET
    """Calls that could not be read; their text is in `content`."""


class ChatChoice(Struct, kw_only=True):
    """One choice of a chat response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
    """A whole chat response."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallDelta(Struct, kw_only=True):
    """More of a function's arguments; its name comes first."""

    arguments: str = ""
    name: str | UnsetType = UNSET


class ChatToolCallDelta(Struct, kw_only=True):
    """More of a call. Its first delta has the id, the type and the name."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None
    malformed_tool_calls: int = 0
    """Only in the last chunk: number of calls that could not be read. Parts of such calls may
    have been sent before; ignore them."""


class ChatChunkChoice(Struct, kw_only=True):
    """The part of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One chunk of a streamed chat response."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: UsageAnswer | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    """The served model."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["headwater"] = "headwater"


class ModelList(Struct, kw_only=True):
    """Body of GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeAnswer(Struct, kw_only=True):
    """Body of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct, kw_only=True):
    """Body of POST /detokenize."""

    prompt: str


class RouterHealth(Struct, kw_only=True, frozen=True):
    """The registration of an instance at one router. It does not affect serving."""

    url: str
    registered: bool
    error: str | None = None
    """Why the last heartbeat failed."""


class Health(Struct, kw_only=True):
    """Body of GET /health and /health_generate."""

    status: Literal["ok"] = "ok"
    routers: list[RouterHealth] | UnsetType = UNSET
    """The registration at each router; only on instances with `--router`."""

    warnings: list[str] | UnsetType = UNSET
    """Problems found at start; absent if there are none."""


class Version(Struct, kw_only=True):
    """Body of GET /version."""

    version: str


def cache_details(usages: Sequence[Usage], block_tokens: int, block_bytes: int) -> CacheDetails:
    """Where the prompt tokens of one request came from, summed over its prompts."""

    def found(tier: str) -> int:
        return sum(usage.by_tier.get(tier, 0) for usage in usages)

    loads = [usage.load for usage in usages if usage.load is not None]
    reasons = [usage.miss_reason for usage in usages if usage.miss_reason is not None]
    loaded_tokens = found("host") + found("storage") + found("peer")
    return CacheDetails(
        device=found("device"),
        host=found("host"),
        storage=found("storage"),
        peer=found("peer"),
        recomputed=sum(usage.computed for usage in usages),
        miss_reason=reasons[0] if reasons else None,
        block_tokens=block_tokens,
        queued_s=max((usage.queued_s for usage in usages), default=0.0),
        loaded_bytes=loaded_tokens * (block_bytes // block_tokens),
        load=LoadDetails(**asdict(loads[0])) if loads else None,
    )
