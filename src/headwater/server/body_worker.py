"""The worker process of `BodyParser`."""

import msgspec
import numpy as np

from headwater.server.body_limits import decode_long_json
from headwater.server.body_parser import KINDS, ParsedBody, token_lists
from headwater.server.errors import RequestRefused
from headwater.server.worker_pool import serve_requests


def parse(raw: bytes, kind: type[msgspec.Struct], max_ids: int) -> ParsedBody:
    """Parse one body: validated, token ids packed, everything else as msgpack."""
    try:
        body = decode_long_json(raw, kind)
        ids = [_pack(entry, max_ids) for entry in token_lists(body)]
        for entry in token_lists(body):
            entry.clear()
    except RequestRefused as refused:
        return ParsedBody(error=str(refused), param=refused.param, code=refused.code)
    return ParsedBody(body=msgspec.msgpack.encode(body), ids=ids)


def _pack(ids: list[int], max_ids: int) -> bytes:
    if len(ids) > max_ids:
        raise RequestRefused(
            f"a prompt has {len(ids)} token ids; the limit is {max_ids}. Shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(type(token) is int for token in ids):
        raise RequestRefused(
            "prompt must be text, token ids, a list of texts or a list of token id lists",
            param="prompt",
        )
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise RequestRefused(
            f"a token id must be at least 0 and below 2^31, got {wrong}", param="prompt"
        )
    return np.array(ids, dtype=np.int32).tobytes()


def _work(name: str, raw: bytes, max_ids: int) -> bytes:
    return msgspec.msgpack.encode(parse(raw, KINDS[name], max_ids))


if __name__ == "__main__":
    serve_requests(_work)
