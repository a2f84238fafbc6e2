"""The OpenAI wire types that answers are written from."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class LoadDetails(Struct, kw_only=True):
    """Load, split or compute: what was chosen for blocks below the device, and at what price."""

    choice: str
    host_blocks: int
    """Found there when it was chosen."""

    storage_blocks: int
    num_blocks: int
    """Chosen to be loaded, from the first on; 0 is to compute them all."""

    load_s: float | None
    """Expected; null where nothing was measured yet."""

    recompute_s: float | None
    chosen_s: float | None
    waited_s: float
    """How long the request waited for nothing else."""

    shortfall: str | None
    """Why less arrived than was chosen."""


class CacheDetails(Struct, kw_only=True):
    """Where the prompt's tokens came from, and why no more of them were found."""

    device: int
    host: int
    storage: int
    peer: int
    recomputed: int
    miss_reason: str | None
    block_tokens: int
    """Only whole blocks are found again, so this is the shortest prefix that can hit."""

    queued_s: float
    """From arrival to admission; of several prompts the longest."""

    loaded_bytes: int
    """KV brought up from lower tiers or peers."""

    load: LoadDetails | None
    """Of the first prompt for which lower tiers had something, or were asked."""


class PromptTokensDetails(Struct, kw_only=True):
    """`cached_tokens` is always there, 0 when none."""

    cached_tokens: int
    cache: CacheDetails | UnsetType = UNSET


class UsageAnswer(Struct, kw_only=True):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities as the completions API has them: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """A whole answer, or one chunk of a streamed one."""

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
    """Log-probabilities as the chat API has them."""

    content: list[TokenLogprob]


class ChatMessage(Struct, kw_only=True):
    """What the model said."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(Struct, kw_only=True):
    """One reply."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
    """A whole chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a reply."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, kw_only=True):
    """One reply's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """One chunk of a streamed chat answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: UsageAnswer | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


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


class Health(Struct, kw_only=True):
    """Body of GET /health and /health_generate."""

    status: Literal["ok"] = "ok"


class Version(Struct, kw_only=True):
    """Body of GET /version."""

    version: str


class ControlDone(Struct, kw_only=True):
    """Body of a control operation that has nothing else to say."""

    status: Literal["done"] = "done"


class SessionClosed(Struct, kw_only=True):
    """Body of POST /cache/sessions/{session_id}."""

    known: bool
    """Whether there was such a session; if not, there was nothing to do."""


class ResetAnswer(Struct, kw_only=True):
    """Body of POST /reset_prefix_cache: blocks by tier."""

    removed: dict[str, int]
    kept: dict[str, int]
    """In use: they go when that ends, or, where one tier alone was to be forgotten, stay."""

    status: Literal["done"] = "done"


class Aborted(Struct, kw_only=True):
    """Body of POST /v1/abort_requests."""

    aborted: int


class ReloadAnswer(Struct, kw_only=True):
    """Body of POST /v1/reload_weights."""

    fingerprint: str
    changed: bool
    """Whether it is another than before; then nothing is cached any more."""
