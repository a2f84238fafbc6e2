"""The worker process of `FieldReader`."""

import msgspec

from headwater.server.router.prompt_fields import prompt_fields
from headwater.server.worker_pool import serve_requests


def _work(path: str, raw: bytes, max_text_bytes: int) -> bytes:
    return msgspec.msgpack.encode(prompt_fields(path, raw, max_text_bytes))


if __name__ == "__main__":
    serve_requests(_work)
