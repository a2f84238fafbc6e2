"""The Anthropic wire types of POST /v1/messages."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headwater.server.schema import (
    Count,
    Name,
    ResumedChoice,
    ReturnsIn,
    Salt,
    Seed,
    SessionId,
    SmallCount,
    ToolName,
)


class CacheControl(Struct, kw_only=True):
    """`cache_control` of a block: the client will send this prefix again."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class ContentBlock(Struct, kw_only=True):
    """One block of a message's content; its fields depend on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class MessageParam(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class MessagesTool(Struct, kw_only=True):
    """A tool that the client runs. Tools that Anthropic's servers run are not supported."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(Struct, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """`thinking`: whether the chat template asks for reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: SmallCount | None = None


class MessagesMetadata(Struct, kw_only=True):
    """`metadata`."""

    user_id: str | None = None


class OutputFormat(Struct, kw_only=True):
    """`output_format`: the answer follows a JSON schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """`output_config`."""

    format: OutputFormat | None = None
    effort: Name | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Name | None = None
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=512)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. The last fields are Headwater's own."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: SmallCount | None = None
    metadata: MessagesMetadata | None = None
    cache_control: CacheControl | None = None

    seed: Seed | None = None
    cache_salt: Salt | None = None
    session_id: SessionId | None = None
    cache_hint: Literal["closed", "pending"] | ReturnsIn | None = None
    cache_details: bool | None = None
    request_id: Name | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    continue_choices: list[ResumedChoice] | None = None


class MessagesUsage(Struct, kw_only=True):
    """Tokens in and out. The three kinds of input tokens add up to the prompt."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    """Tokens computed now; the next request with this beginning finds them."""


BlockKind = Literal["text", "thinking", "tool_use"]


class AnswerBlock(Struct, kw_only=True, omit_defaults=True):
    """One block of an answer."""

    type: BlockKind
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessagesAnswer(Struct, kw_only=True):
    """Body of a response."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    stop_reason: str | None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    malformed_tool_calls: int | UnsetType = UNSET
    """Calls that could not be read; their text is a text block. Headwater's own."""


class CountTokensAnswer(Struct, kw_only=True):
    """Body of a response of count_tokens."""

    input_tokens: int


class MessagesErrorObject(Struct, kw_only=True):
    """The part of an error that Anthropic's clients show to their user."""

    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Body of an error."""

    error: MessagesErrorObject
    type: Literal["error"] = "error"


class MessageStart(Struct, kw_only=True):
    message: MessagesAnswer
    type: Literal["message_start"] = "message_start"


class BlockStart(Struct, kw_only=True):
    index: int
    content_block: AnswerBlock
    type: Literal["content_block_start"] = "content_block_start"


class BlockDelta(Struct, kw_only=True, omit_defaults=True):
    """What is added to a block."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta", "signature_delta"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


class BlockDeltaEvent(Struct, kw_only=True):
    index: int
    delta: BlockDelta
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(Struct, kw_only=True):
    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class MessageEnd(Struct, kw_only=True):
    """Why a message ended."""

    stop_reason: str | None
    stop_sequence: str | None = None
    malformed_tool_calls: int | UnsetType = UNSET
    """Calls that could not be read. Parts of such calls may have been sent before; ignore them.
    Headwater's own."""


class MessageDeltaEvent(Struct, kw_only=True):
    delta: MessageEnd
    usage: MessagesUsage
    type: Literal["message_delta"] = "message_delta"


class MessageStop(Struct, kw_only=True):
    type: Literal["message_stop"] = "message_stop"
