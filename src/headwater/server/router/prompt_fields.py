"""The fields of a request that decide where it goes.

They are read in a worker process for long bodies (`prompt_worker`), so everything here is bytes,
numbers and short texts: nothing that takes long to decode on the router's event loop.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headwater.server import messages_request, responses_request
from headwater.server.body import decode_json, is_short
from headwater.server.body_limits import decode_long_json
from headwater.server.chat_prompt import template_settings
from headwater.server.errors import RequestRefused
from headwater.server.messages_schema import MessagesRequest
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from headwater.server.worker_pool import WorkerPool

S = TypeVar("S", bound=msgspec.Struct)

GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
)
"""Paths whose requests have a prompt."""


class PromptFields(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """The fields of a request that a router reads; empty if it could not be parsed."""

    model: str | None = None
    cache_salt: str = ""
    previous_response_id: str | None = None
    token_ids: bytes = b""
    """The first prompt as int32, when it is given as token ids."""

    text: bytes = b""
    """The first prompt as the body of a `/tokenize` request, when it is text."""


_NO_FIELDS = PromptFields()


class FieldReader:
    """Reads the fields of requests; `close` ends its worker processes."""

    def __init__(self) -> None:
        self._workers = WorkerPool("headwater.server.router.prompt_worker")

    async def read(self, path: str, raw: bytes, max_text_bytes: int) -> PromptFields:
        """The fields of a request to `path`. Never stops the event loop for long. A text above
        `max_text_bytes` is left out."""
        if path not in GENERATING:
            return _NO_FIELDS
        if is_short(raw):
            return prompt_fields(path, raw, max_text_bytes)
        try:
            result = await self._workers.ask(path, raw, max_text_bytes)
        except RequestRefused:
            return _NO_FIELDS
        return msgspec.msgpack.decode(result, type=PromptFields)

    def close(self) -> None:
        """End the worker processes. Calling it twice is safe."""
        self._workers.close()


def prompt_fields(path: str, raw: bytes, max_text_bytes: int) -> PromptFields:
    """The fields of one request; `_NO_FIELDS` for a body that the instance will refuse."""
    try:
        fields = _all_fields(path, raw)
    except RequestRefused:
        return _NO_FIELDS
    if len(fields.text) > max_text_bytes or len(fields.token_ids) > max_text_bytes // 16:
        # Longer than any context: the instance will refuse it, and nothing is hashed here.
        return msgspec.structs.replace(fields, text=b"", token_ids=b"")
    return fields


def _all_fields(path: str, raw: bytes) -> PromptFields:
    match path:
        case "/v1/messages":
            return _chat_fields(messages_request.chat_request(_decode(raw, MessagesRequest)))
        case "/v1/responses":
            body = _decode(raw, ResponsesRequest)
            fields = _chat_fields(responses_request.chat_request(body))
            before = body.previous_response_id
            return msgspec.structs.replace(fields, previous_response_id=before)
        case "/v1/chat/completions":
            return _chat_fields(_decode(raw, ChatRequest))
        case _:
            return _completion_fields(_decode(raw, CompletionRequest))


def _decode(raw: bytes, kind: type[S]) -> S:
    return decode_json(raw, kind) if is_short(raw) else decode_long_json(raw, kind)


def _completion_fields(body: CompletionRequest) -> PromptFields:
    prompt: str | Sequence[object] = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    fields = PromptFields(model=body.model, cache_salt=body.cache_salt or "")
    if not isinstance(prompt, str):
        return msgspec.structs.replace(fields, token_ids=_packed(prompt))
    text = TokenizeRequest(
        prompt=prompt, add_special_tokens=body.add_special_tokens is not False
    )
    return msgspec.structs.replace(fields, text=msgspec.json.encode(text))


def _chat_fields(body: ChatRequest) -> PromptFields:
    text = TokenizeRequest(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        chat_template_kwargs=template_settings(body),
        tools=body.tools,
    )
    return PromptFields(
        model=body.model,
        cache_salt=body.cache_salt or "",
        text=msgspec.json.encode(text),
    )


def _packed(ids: Sequence[object]) -> bytes:
    """Token ids as int32; empty when one of them is no token id."""
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        return b""
    return np.array(ids, dtype=np.int32).tobytes()
