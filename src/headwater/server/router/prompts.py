"""Computes the block hashes of a request's prompt.

Tokens come from the model's tokenizer or from an instance's `/tokenize`. A request that cannot
be parsed is routed by load; the instance answers it with the error.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np
from starlette.requests import Request

from headwater.cache import KeyScheme, Namespace
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import HeadwaterError
from headwater.metrics.kv_events import block_hash
from headwater.server import messages_request, responses_request
from headwater.server.body_parser import BodyParser
from headwater.server.chat_messages import num_characters, plain_messages, template_settings
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.messages_schema import MessagesRequest
from headwater.server.middleware import access_of
from headwater.server.responses_schema import ResponsesRequest
from headwater.server.router.instance import Instance
from headwater.server.schema import ChatRequest, CompletionRequest
from headwater.server.tools import template_tools
from headwater.types import Tokens

_ASK_TIMEOUT_S = 5.0
_THREADS = 2
_MAX_CHARS_PER_TOKEN = 64
"""A text with more characters per token of the context is not tokenized for routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPath:
    """The block hashes of a prompt, as far as known."""

    num_tokens: int = 0
    hashes: Sequence[int] = ()
    """Hashes of the blocks that can hit; the last token is always computed."""


UNKNOWN = PromptPath()
"""The path of a request that could not be parsed."""


class PromptReader:
    """Parses and tokenizes requests; `close` ends its threads."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        session: aiohttp.ClientSession,
        cluster: ClusterAuth,
    ) -> None:
        self._tokenizer = tokenizer
        self._session = session
        self._cluster = cluster
        self._parser = BodyParser()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """Safe to call twice."""
        self._parser.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(
        self,
        raw: bytes,
        request: Request,
        scheme: KeyScheme,
        asked: Instance,
    ) -> PromptPath:
        """The path of the request's first prompt; `asked` may be asked to tokenize it."""
        try:
            body = await self._parse(request.url.path, raw)
        except HeadwaterError:
            return UNKNOWN
        tokens = await self._tokens(body, request.headers, asked)
        if tokens is None or not len(tokens):
            return UNKNOWN
        salt = body.cache_salt or access_of(request).caller.cache_salt
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, _path_of, tokens, scheme, salt
        )

    async def _parse(self, path: str, raw: bytes) -> ChatRequest | CompletionRequest:
        """The request; those of other APIs in the form of a chat request."""
        if path.endswith("/messages"):
            return messages_request.chat_request(await self._parser.parse(raw, MessagesRequest))
        if path.endswith("/responses"):
            return responses_request.chat_request(
                await self._parser.parse(raw, ResponsesRequest)
            )
        if path.endswith("/chat/completions"):
            return await self._parser.parse(raw, ChatRequest)
        return await self._parser.parse(raw, CompletionRequest)

    async def _tokens(
        self,
        body: ChatRequest | CompletionRequest,
        headers: Mapping[str, str],
        asked: Instance,
    ) -> Tokens | None:
        if isinstance(body, CompletionRequest):
            ids = _token_ids(body)
            if ids is not None:
                return np.array(ids, dtype=np.int32)
        fields = _text_fields(body)
        limit = asked.registration.max_model_len
        if fields is None or (limit and _num_characters(fields) > _MAX_CHARS_PER_TOKEN * limit):
            return None  # too long for any instance, which will say so
        tokenizer = self._tokenizer
        if tokenizer is None:
            return await self._ask(asked, fields, headers)
        max_tokens = asked.registration.max_model_len or None
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: _encode(tokenizer, body, fields, max_tokens)
            )
        except HeadwaterError:
            return None

    async def _ask(
        self, asked: Instance, fields: dict[str, Any], headers: Mapping[str, str]
    ) -> Tokens | None:
        """The tokens from an instance's `/tokenize`, or None when it fails."""
        sent = {"content-type": "application/json"}
        if not self._cluster.has_token:
            keys = ("authorization", "x-api-key")
            sent |= {key: headers[key] for key in keys if key in headers}
        sent = self._cluster.sign("POST", "/tokenize", sent)
        try:
            async with (
                asyncio.timeout(_ASK_TIMEOUT_S),
                self._session.post(
                    f"{asked.registration.url}/tokenize",
                    data=msgspec.json.encode(fields),
                    headers=sent,
                ) as answer,
            ):
                if answer.status != 200:
                    return None
                body = msgspec.json.decode(await answer.read())
                return np.array(body["tokens"], dtype=np.int32)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, KeyError, ValueError):
            return None


class _StoredRef(msgspec.Struct):
    """The one field of a responses request that decides where it can be answered."""

    previous_response_id: str | None = None


def stored_response(path: str, raw: bytes) -> str | None:
    """The stored response that a request is about; None where it names none."""
    prefix = "/v1/responses"
    if path.startswith(prefix + "/"):
        return path.removeprefix(prefix + "/")
    if path != prefix:
        return None
    try:
        return msgspec.json.decode(raw, type=_StoredRef).previous_response_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _path_of(tokens: Tokens, scheme: KeyScheme, salt: str) -> PromptPath:
    usable = (len(tokens) - 1) // scheme.block_tokens * scheme.block_tokens
    keys = scheme.chain(scheme.root(Namespace(salt=salt)), tokens[:usable].tobytes(), None)
    return PromptPath(num_tokens=len(tokens), hashes=[block_hash(key) for key in keys])


def _num_characters(fields: dict[str, Any]) -> int:
    return len(fields.get("prompt", "")) + num_characters(fields.get("messages", ()))


def _token_ids(body: CompletionRequest) -> list[int] | None:
    """The first prompt when it is given as token ids."""
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        return prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        ids = [token for token in prompt if isinstance(token, int)]
        return ids if all(0 <= token < 1 << 31 for token in ids) else None
    return None


def _text_fields(body: ChatRequest | CompletionRequest) -> dict[str, Any] | None:
    """The body of a /tokenize request for the first prompt."""
    if isinstance(body, CompletionRequest):
        prompt = (
            body.prompt[0] if isinstance(body.prompt, list) and body.prompt else body.prompt
        )
        if not isinstance(prompt, str):
            return None
        return {"prompt": prompt, "add_special_tokens": body.add_special_tokens is not False}
    return {
        "messages": msgspec.to_builtins(body.messages),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "chat_template_kwargs": template_settings(body),
        "tools": None if body.tools is None else msgspec.to_builtins(body.tools),
    }


def _encode(
    tokenizer: Tokenizer,
    body: ChatRequest | CompletionRequest,
    fields: dict[str, Any],
    max_tokens: int | None,
) -> Tokens:
    if isinstance(body, ChatRequest):
        return tokenizer.encode_chat(
            plain_messages(body.messages),
            add_generation_prompt=fields["add_generation_prompt"],
            settings=fields["chat_template_kwargs"],
            tools=template_tools(body.tools),
            max_tokens=max_tokens,
        )
    return tokenizer.encode(
        fields["prompt"],
        add_special_tokens=fields["add_special_tokens"],
        max_tokens=max_tokens,
    )
