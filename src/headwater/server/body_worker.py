"""The worker process of `BodyParser`: reads bodies from stdin, writes results to stdout.

It ends when its input ends, so it does not outlive the server.
"""

import resource
import sys
from typing import Any, BinaryIO

import msgspec
import numpy as np

from headwater.server.body import decode_json
from headwater.server.body_parser import (
    KINDS,
    MAX_VALUES,
    ParsedBody,
    token_lists,
)
from headwater.server.errors import RequestRefused

_MAX_MEMORY_BYTES = 4 << 30


def parse(raw: bytes, kind: type[msgspec.Struct], max_ids: int) -> ParsedBody:
    """One body: validated, its token ids packed, everything else as msgpack."""
    try:
        body = decode_json(raw, kind)
        ids = [_pack(entry, max_ids) for entry in token_lists(body)]
        for entry in token_lists(body):
            entry.clear()
        if _num_values(msgspec.to_builtins(body), MAX_VALUES) > MAX_VALUES:
            raise RequestRefused(
                f"the body has more than {MAX_VALUES} values beside token ids; send a smaller one"
            )
    except RequestRefused as refused:
        return ParsedBody(error=str(refused), param=refused.param, code=refused.code)
    return ParsedBody(body=msgspec.msgpack.encode(body), ids=ids)


def _pack(ids: list[int], max_ids: int) -> bytes:
    if len(ids) > max_ids:
        raise RequestRefused(
            f"a list has {len(ids)} token ids; the limit is {max_ids}",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(type(token) is int for token in ids):
        raise RequestRefused(
            "prompt must be text, token ids, a list of texts or a list of token id lists",
            param="prompt",
        )
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise RequestRefused("a token id is negative or not below 2^31", param="prompt")
    return np.array(ids, dtype=np.int32).tobytes()


def _num_values(value: Any, most: int) -> int:  # noqa: ANN401 -- JSON
    """Number of JSON values; counting stops soon after `most`."""
    count, todo = 0, [value]
    while todo and count <= most:
        entry = todo.pop()
        count += 1
        if isinstance(entry, dict):
            todo += entry.values()
        elif isinstance(entry, list):
            todo += entry
    return count


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    while size := int.from_bytes(source.read(8), "big"):
        message = source.read(size)
        end = 1 + message[0]
        kind = KINDS[message[1:end].decode()]
        max_ids = int.from_bytes(message[end : end + 8], "big")
        payload = msgspec.msgpack.encode(parse(message[end + 8 :], kind, max_ids))
        sink.write(len(payload).to_bytes(8, "big") + payload)
        sink.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
