"""The request bodies of the OpenAI API.

Fields not listed here are accepted and ignored. `null` means the default, as OpenAI clients send
it. Limits that depend on settings are checked in `params`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headwater.scheduler.request import BOUNDS, MAX_LOAD_TIMEOUT_S, MAX_RETURNS_IN_S
from headwater.types import LoadPolicy

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
SmallCount = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
SESSION_ID = r"^[\x21-\x7e]{1,256}$"
"""Pattern of a session id: printable ASCII without spaces."""

SessionId = Annotated[str, Meta(pattern=SESSION_ID)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]

Prompt = str | list[int | str | list[TokenId]]
"""Text, token ids, or a list of either. Looser than the API, because msgspec cannot distinguish
two list types in a union; `completions` checks the exact shape and `openapi` documents it."""


def _within(name: str) -> Meta:
    """The allowed range of a sampling field, for validation and for the OpenAPI document."""
    least, most = BOUNDS[name]
    return Meta(gt=least, le=most) if name == "top_p" else Meta(ge=least, le=most)


class StreamOptions(Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ReturnsIn(Struct, kw_only=True, forbid_unknown_fields=True):
    """`cache_hint` of a session that is expected back after a number of seconds."""

    returns_in_s: Annotated[float, Meta(ge=0, le=MAX_RETURNS_IN_S)]


class ResumedChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """One entry of `continue_choices`: output that another instance has generated."""

    token_ids: list[TokenId] = []
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Seed of the request's first choice; None when nothing was generated."""

    created: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """`created` of the response that the client has the beginning of."""

    has_ended: bool = False


class JsonSchemaFormat(Struct, kw_only=True):
    """`json_schema` of a response format."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Accepted and without effect: output always follows the schema."""


class ResponseFormat(Struct, kw_only=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(Struct, kw_only=True):
    """`structured_outputs`: exactly one of the fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class RefusedSampling(Struct, kw_only=True):
    """Sampling fields of vLLM, SGLang and FastDeploy that this server refuses when they are set.

    `body.NEUTRAL` has the values without effect, which are accepted."""

    allowed_token_ids: Any = None
    bad_words: Any = None
    bad_words_token_ids: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    ebnf: Any = None
    early_stopping: Any = None
    guided_json_object: Any = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    lora_path: Any = None
    mm_processor_kwargs: Any = None
    no_stop_trim: Any = None
    prompt_embeds: Any = None
    reasoning_max_tokens: Any = None
    regex: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    thinking_token_budget: Any = None
    top_a: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = None
    vllm_xargs: Any = None


class Sampling(RefusedSampling, kw_only=True):
    """Fields shared by completions and chat. Fields of type Any are listed in
    `body.NEUTRAL`."""

    model: Name | None = None
    max_tokens: Count | None = None
    min_tokens: SmallCount | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    logit_bias: dict[str, Annotated[float, _within("logit_bias")]] | None = None
    seed: Seed | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    conversation: str | None = None
    """Names the session if `session_id` is missing, as `prompt_cache_key` and `user` do."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: Any = None
    prompt_logprobs: SmallCount | None = None
    """Number of alternatives for each prompt token; the whole prompt is then computed."""
    use_beam_search: Any = None

    cache_salt: Salt | None = None
    session_id: SessionId | None = None
    cache_hint: Literal["closed", "pending"] | ReturnsIn | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    request_id: Name | None = None
    return_token_ids: bool | None = None
    continue_choices: list[ResumedChoice] | None = None
    cache_details: bool | None = None
    load_policy: LoadPolicy | None = None
    load_timeout_s: Annotated[float, Meta(ge=0, le=MAX_LOAD_TIMEOUT_S)] | None = None


class CompletionRequest(Sampling, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: SmallCount | None = None
    """0 only with `echo`: the answer is the prompt."""

    logprobs: SmallCount | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    """Whether the text begins with the prompt."""

    suffix: Any = None


class TextPart(Struct, kw_only=True):
    """One part of a message's content. Only text is supported."""

    type: str
    text: str | None = None


ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class CalledFunction(Struct, kw_only=True):
    """The function of a call in the history."""

    name: Name
    arguments: str = "{}"


class MessageToolCall(Struct, kw_only=True):
    """A call in the history."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Name
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Passed to the chat template, which decides whether the model sees it again."""


class FunctionFields(Struct, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Struct, kw_only=True):
    """One of `tools`."""

    function: FunctionFields
    type: Literal["function"] = "function"


class FunctionName(Struct, kw_only=True):
    """The function that `tool_choice` names."""

    name: ToolName


class NamedToolChoice(Struct, kw_only=True):
    """`tool_choice` of one function."""

    function: FunctionName
    type: Literal["function"] = "function"


class ChatRequest(Sampling, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: SmallCount | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: Annotated[list[ToolFields], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    """Passed to the chat template."""

    include_reasoning: bool | None = None
    """Whether the answer has `reasoning_content`; true by default."""

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    documents: Any = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=512)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: Name | None = None
    skip_special_tokens: bool | None = None
