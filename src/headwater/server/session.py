"""Which session a request belongs to, when it does not say so itself."""

import re
from collections.abc import Sequence
from hashlib import sha256

from headwater.server.schema import SESSION_ID, ChatRequest, Message, Sampling

_SESSION_ID = re.compile(SESSION_ID)


def session_name(body: Sampling) -> str:
    """The session: `session_id`, else what `conversation`, `prompt_cache_key` or `user` tell.

    One user has many conversations, so `user` counts together with how a chat begins. Empty
    where a request says nothing; it is then recognised by its prefix alone.
    """
    for name in (body.session_id, body.conversation, body.prompt_cache_key):
        if name:
            return _as_id(name)
    if body.user and isinstance(body, ChatRequest):
        return _as_id(body.user)[:200] + "/" + conversation_start(body.messages)[:16]
    return ""


def conversation_start(messages: Sequence[Message]) -> str:
    """A name for the conversation that begins so; the same for each of its turns."""
    digest = sha256()
    for message in messages:
        digest.update(repr((message.role, message.content)).encode(errors="replace"))
        if message.role == "user":
            break
    return digest.hexdigest()[:32]


def _as_id(name: str) -> str:
    return (
        name if _SESSION_ID.match(name) else sha256(name.encode(errors="replace")).hexdigest()
    )
