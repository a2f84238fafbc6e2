"""The OpenAI wire types of POST /v1/responses."""

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

RESPONSE_ID = r"^resp_[A-Za-z0-9_-]{1,128}$"
ResponseId = Annotated[str, Meta(pattern=RESPONSE_ID)]


class InputPart(Struct, kw_only=True):
    """One part of an item's content. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """One item of the input; its fields depend on its type."""

    type: str | None = None
    """None means a message."""

    role: Name | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ResponsesTool(Struct, kw_only=True):
    """A tool that the client runs. Tools that OpenAI's servers run are not supported."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(Struct, kw_only=True):
    """`tool_choice` of one function."""

    type: str
    name: Name | None = None


class TextFormat(Struct, kw_only=True):
    """`format` of `text`."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextFields(Struct, kw_only=True):
    """`text`: the form of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(Struct, kw_only=True):
    """`reasoning`: how much the model reasons."""

    effort: Name | None = None
    summary: str | None = None


class ConversationRef(Struct, kw_only=True):
    """`conversation` as an object."""

    id: Name


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses. The last fields are Headwater's own."""

    input: str | list[InputItem]
    model: Name | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    conversation: str | ConversationRef | None = None
    background: bool | None = None
    top_logprobs: SmallCount | None = None

    seed: Seed | None = None
    top_k: SmallCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None
    session_id: SessionId | None = None
    cache_hint: Literal["closed", "pending"] | ReturnsIn | None = None
    cache_details: bool | None = None
    request_id: Name | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    continue_choices: list[ResumedChoice] | None = None


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    content: list[OutputText]
    status: str = "completed"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning of the model."""

    id: str
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model made."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(Struct, kw_only=True):
    reasoning_tokens: int


class ResponsesUsage(Struct, kw_only=True):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesAnswer(Struct, kw_only=True):
    """A response."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    object: Literal["response"] = "response"
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: float | None = None
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    malformed_tool_calls: int | UnsetType = UNSET


class ResponseDeleted(Struct, kw_only=True):
    """Body of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ResponseEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of a stream; its fields depend on its type."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ResponseErrorEvent(Struct, kw_only=True):
    """A failure in the middle of a stream."""

    message: str
    code: str | int | None = None
    param: str | None = None
    sequence_number: int = 0
    type: Literal["error"] = "error"
