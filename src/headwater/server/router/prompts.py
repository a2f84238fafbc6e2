"""Computes the block hashes of a request's prompt, for each group of instances.

Tokens come from the model's tokenizer or from an instance's `/tokenize`. A request that cannot
be parsed is routed by load; the instance answers it with the error.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import aiohttp
import msgspec
import numpy as np
from starlette.requests import Request

from headwater.cache import KeyScheme, Namespace
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import HeadwaterError
from headwater.metrics.kv_events import block_hash
from headwater.server.body import pieces
from headwater.server.chat_prompt import plain_messages, template_tools
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.middleware import access_of
from headwater.server.router.instance import Instance
from headwater.server.router.prompt_fields import FieldReader, PromptFields
from headwater.server.router.protocol import ModelGroup
from headwater.server.schema import TokenizeRequest
from headwater.types import Tokens

_ASK_TIMEOUT_S = 5.0
_THREADS = 2
_MAX_BYTES_PER_TOKEN = 64
"""A prompt with more bytes of JSON than this per token of the context is not tokenized for
routing."""

_MAX_TEXT_BYTES = 1 << 24
"""Longest prompt, in bytes of JSON, that is tokenized for routing if the context of an instance
is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPath:
    """The block hashes of a prompt, as far as known."""

    num_tokens: int = 0
    hashes: Sequence[int] = ()
    """Hashes of the blocks that can hit; the last token is always computed."""


UNKNOWN = PromptPath()
"""The path of a request that could not be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPaths:
    """The path of one prompt in each group. Groups have no block in common, because the
    fingerprint is part of every key."""

    model: str | None = None
    """The model that the request names."""

    by_group: Mapping[ModelGroup, PromptPath] = field(default_factory=dict)

    def of(self, instance: Instance) -> PromptPath:
        """The path in the group of `instance`."""
        return self.by_group.get(instance.group, UNKNOWN)


class _Tokens(msgspec.Struct):
    """The part of an answer of `/tokenize` that is read."""

    tokens: list[int]


class PromptReader:
    """Reads and tokenizes requests; `close` ends its threads and processes."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        session: aiohttp.ClientSession,
        cluster: ClusterAuth,
    ) -> None:
        self._tokenizer = tokenizer
        self._session = session
        self._cluster = cluster
        self._fields = FieldReader()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """End the threads and processes. Calling it twice is safe."""
        self._fields.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def fields(self, path: str, raw: bytes, ready: Sequence[Instance]) -> PromptFields:
        """The fields that determine the route of a request to one of `ready`."""
        longest = max((entry.registration.max_model_len for entry in ready), default=0)
        limit = _MAX_BYTES_PER_TOKEN * longest or _MAX_TEXT_BYTES
        return await self._fields.read(path, raw, limit)

    async def paths(
        self, fields: PromptFields, request: Request, asked: Sequence[Instance]
    ) -> PromptPaths:
        """The paths of the request's first prompt. `asked` has one instance of each group, which
        may be asked to tokenize it."""
        salt = fields.cache_salt or access_of(request).caller.cache_salt
        found = await asyncio.gather(
            *(self._path(fields, salt, request.headers, entry) for entry in asked)
        )
        groups = [entry.group for entry in asked]
        return PromptPaths(model=fields.model, by_group=dict(zip(groups, found, strict=True)))

    async def _path(
        self, fields: PromptFields, salt: str, headers: Mapping[str, str], asked: Instance
    ) -> PromptPath:
        tokens = await self._tokens(fields, headers, asked)
        if tokens is None or not len(tokens):
            return UNKNOWN
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, _path_of, tokens, asked.group, salt
        )

    async def _tokens(
        self, fields: PromptFields, headers: Mapping[str, str], asked: Instance
    ) -> Tokens | None:
        if fields.token_ids:
            return np.frombuffer(fields.token_ids, dtype=np.int32)
        limit = asked.registration.max_model_len
        if not fields.text or len(fields.text) > _MAX_BYTES_PER_TOKEN * (limit or math.inf):
            return None  # the instance will report what is wrong
        tokenizer = self._tokenizer
        if tokenizer is None:
            return await self._ask(asked, fields.text, headers)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: _encode(tokenizer, fields.text, limit or None)
            )
        except HeadwaterError:
            return None

    async def _ask(
        self, asked: Instance, body: bytes, headers: Mapping[str, str]
    ) -> Tokens | None:
        """The tokens from an instance's `/tokenize`, or None when it fails."""
        sent = {"content-type": "application/json", "content-length": str(len(body))}
        if not self._cluster.has_token:
            keys = ("authorization", "x-api-key")
            sent |= {key: headers[key] for key in keys if key in headers}
        sent = self._cluster.sign("POST", "/tokenize", sent)
        try:
            async with (
                asyncio.timeout(_ASK_TIMEOUT_S),
                self._session.post(
                    f"{asked.registration.url}/tokenize", data=pieces(body), headers=sent
                ) as answer,
            ):
                if answer.status != 200:
                    return None
                found = msgspec.json.decode(await answer.read(), type=_Tokens)
                return np.array(found.tokens, dtype=np.int32)
        except (aiohttp.ClientError, TimeoutError, ValueError, OverflowError):
            return None


def stored_response(path: str, fields: PromptFields) -> str | None:
    """The stored response that a request names; None if it names none."""
    prefix = "/v1/responses/"
    if path.startswith(prefix):
        return path.removeprefix(prefix)
    return fields.previous_response_id


def _path_of(tokens: Tokens, group: ModelGroup, salt: str) -> PromptPath:
    scheme = KeyScheme(
        block_tokens=group.block_tokens,
        fingerprint=bytes.fromhex(group.fingerprint),
        kv_format=group.kv_format,
    )
    usable = (len(tokens) - 1) // scheme.block_tokens * scheme.block_tokens
    keys = scheme.chain(scheme.root(Namespace(salt=salt)), tokens[:usable].tobytes(), None)
    return PromptPath(num_tokens=len(tokens), hashes=[block_hash(key) for key in keys])


def _encode(tokenizer: Tokenizer, text: bytes, max_tokens: int | None) -> Tokens:
    body = msgspec.json.decode(text, type=TokenizeRequest)
    if body.messages is None:
        return tokenizer.encode(
            body.prompt or "",
            add_special_tokens=bool(body.add_special_tokens),
            max_tokens=max_tokens,
        )
    return tokenizer.encode_chat(
        plain_messages(body.messages),
        add_generation_prompt=bool(body.add_generation_prompt),
        settings=body.chat_template_kwargs,
        tools=template_tools(body.tools),
        max_tokens=max_tokens,
    )
