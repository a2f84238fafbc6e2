"""Hostile input: malformed, truncated, reordered and slow bytes for each listener.

Everything comes from a seed. An attack returns the status that it got, or None if the protocol
has none or the server closed the connection.
"""

import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Address = tuple[str, int]

_TIMEOUT_S = 5.0
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/resp_x",
    "/cache/sessions/x",
    "/tokenize",
    "/detokenize",
    "/instances",
    "/v1/abort_requests",
    "/v1/models/..%2f..%2fstats",
    "/cache/tree?depth=-1&limit=1e9",
    "/nowhere",
)
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")
_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    1 << 70,
    1e308,
    "",
    "x" * 5000,
    "\ud800",
    [],
    [[]],
    {},
    {"a": {"b": []}},
    [0, "a", None],
    "\x00\x1b[2J",
)
_FIELDS = (
    "prompt",
    "messages",
    "input",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "continue_choices",
    "stream",
    "stream_options",
    "seed",
    "cache_salt",
    "priority",
    "previous_response_id",
    "tokens",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "structured_outputs",
    "chat_template_kwargs",
    "session_id",
    "cache_hint",
    "user",
    "echo",
    "prompt_logprobs",
    "request_id",
    "system",
    "logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackTarget:
    """A listener of the cluster."""

    name: str
    address: Address
    is_http: bool


Attack = Callable[[random.Random, Address], int | None]


def wrong_json(rng: random.Random, address: Address) -> int | None:
    """A JSON object with fields of wrong types and sizes, for an endpoint that takes JSON."""
    fields = rng.sample(_FIELDS, rng.randint(1, 6))
    body = json.dumps({name: rng.choice(_VALUES) for name in fields} | _base(rng)).encode()
    if rng.random() < 0.3:
        body = _damaged(rng, body)
    return _request(address, "POST", rng.choice(_PATHS), body, _headers(rng))


def wrong_http(rng: random.Random, address: Address) -> int | None:
    """Requests whose lines, headers or lengths are wrong."""
    method, path = rng.choice(_METHODS), rng.choice(_PATHS)
    head = f"{method} {path} HTTP/{rng.choice(['1.1', '1.0', '2.0', '9', ''])}\r\n"
    lines = [
        rng.choice(["host: 127.0.0.1", "host: [", "host: [::1", "host: a]b", "host: "]),
        rng.choice(["origin: http://[", "origin: null", "origin: //", "origin: http://a:b:c"]),
        f"content-length: {rng.choice(['-1', '5', '99999999999', 'x', '0'])}",
        "transfer-encoding: chunked",
        "content-length: 7",
        "x: " + "y" * rng.choice([1, 9000, 70_000]),
        f"authorization: Bearer {'k' * rng.choice([0, 40, 4000])}",
        "x-headwater-prefill: 127.0.0.1:1",
        "x-headwater-signature: 0,0,0",
        "x-headwater-signature: v1 \xb2 a b",
        ": no name",
        "x-\x01: y",
    ]
    chosen = rng.sample(lines, rng.randint(0, len(lines)))
    raw = (head + "\r\n".join(chosen) + "\r\n\r\n").encode("latin-1") + rng.randbytes(
        rng.randint(0, 64)
    )
    return _exchange(address, _damaged(rng, raw) if rng.random() < 0.5 else raw)


def half_request(rng: random.Random, address: Address) -> int | None:
    """The beginning of a request; then the client closes its sending side."""
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "stream": True}).encode()
    raw = _raw("POST", "/v1/completions", body, {})
    cut = rng.randint(0, len(raw))
    return _exchange(address, raw[:cut], ends=True)


def slow_request(rng: random.Random, address: Address) -> int | None:
    """A few bytes, a pause, a few bytes more; then the client disconnects."""
    with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as client:
        client.settimeout(0.2)
        for piece in (b"POST /v1/comp", b"letions HTTP/1.1\r\n", b"host: 127.0.0.1\r\n"):
            client.sendall(piece)
            with contextlib.suppress(TimeoutError):
                client.recv(1)
    return None


def many_requests(rng: random.Random, address: Address) -> int | None:
    """Requests sent ahead on one connection, the last one incomplete."""
    one = _raw("GET", rng.choice(("/health", "/v1/models", "/nowhere")), b"", {})
    return _exchange(address, one * rng.randint(2, 40) + one[: rng.randint(0, len(one))])


def good_request(rng: random.Random, address: Address) -> int | None:
    """A valid request whose client disconnects at any time."""
    body = {"prompt": "hello " * rng.randint(1, 40), "max_tokens": rng.randint(1, 12)}
    stream = rng.random() < 0.5
    raw = _raw("POST", "/v1/completions", json.dumps(body | {"stream": stream}).encode(), {})
    return _exchange(address, raw, max_bytes=rng.choice([1, 200, 1 << 20]))


def large_body(rng: random.Random, address: Address) -> int | None:
    """Megabytes of empty lists, messages, numbers or nested lists."""
    piece = rng.choice([b"[],", b'{"role":"user","content":"a"},', b"1,", b"[" * 200 + b"],"])
    field = rng.choice([b"prompt", b"messages", b"chat_template_kwargs", b"tools"])
    body = b'{"' + field + b'":[' + piece * (rng.randint(600_000, 3_000_000) // len(piece))
    return _request(address, "POST", rng.choice(_PATHS[:4]), body + b"0]}", {})


def many_connections(rng: random.Random, address: Address) -> int | None:
    """Idle connections, more than there are file descriptors for."""
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        for _ in range(rng.randint(20, 150)):
            client = opened.enter_context(socket.create_connection(address, 1.0))
        client.settimeout(0.3)
        client.recv(1)
    return None


def random_bytes(rng: random.Random, address: Address) -> int | None:
    """Noise, for any listener."""
    _exchange(address, rng.randbytes(rng.choice([1, 8, 64, 4096])), ends=rng.random() < 0.5)
    return None


def wrong_frames(rng: random.Random, address: Address) -> int | None:
    """Greetings of ZMQ, of peers and of block links, with wrong proofs, orders and lengths."""
    zmq_greeting = (
        b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
    )
    zmq_null = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    link = struct.pack(
        "<8sH6sQ32s32s",
        b"HWLINK\0\0",
        rng.choice([0, 2, 9]),
        b"tcp",
        1 << 40,
        *(
            rng.randbytes(32),
            rng.randbytes(32),
        ),
    )
    frames = [
        zmq_greeting,
        zmq_null,
        b"\x04\x26\x05READY" + rng.randbytes(32),
        link,
        struct.pack("<I", rng.choice([0, 7, 1 << 31])) + rng.randbytes(16),
        struct.pack("<Q", 1 << 62),
        rng.randbytes(64),
    ]
    rng.shuffle(frames)
    raw = b"".join(frames[: rng.randint(1, len(frames))])
    _exchange(address, raw[: rng.randint(1, len(raw))], ends=rng.random() < 0.5)
    return None


HTTP_ATTACKS: Sequence[Attack] = (
    wrong_json,
    wrong_json,
    wrong_json,
    wrong_http,
    half_request,
    slow_request,
    many_requests,
    good_request,
    large_body,
    many_connections,
    random_bytes,
)
FRAME_ATTACKS: Sequence[Attack] = (
    random_bytes,
    many_connections,
    wrong_frames,
    wrong_frames,
)


def _base(rng: random.Random) -> dict[str, object]:
    """Fields that let some of the wrong bodies reach the checks after the parser."""
    return {"max_tokens": 2} if rng.random() < 0.5 else {"prompt": "x", "max_tokens": 2}


def _headers(rng: random.Random) -> dict[str, str]:
    kinds = ("application/json", "text/plain", "")
    return {"content-type": rng.choice(kinds), "x-request-id": "a" * rng.choice([1, 300])}


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    """`raw` cut, with one byte changed, or with two parts exchanged."""
    at = rng.randrange(len(raw))
    kind = rng.randrange(3)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + rng.randbytes(1) + raw[at + 1 :]
    return raw[at:] + raw[:at]


def _raw(method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    fields = {"host": "127.0.0.1", "content-type": "application/json"} | headers
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def _request(
    address: Address, method: str, path: str, body: bytes, headers: dict[str, str]
) -> int | None:
    return _exchange(address, _raw(method, path, body, headers))


def _exchange(
    address: Address, raw: bytes, *, ends: bool = False, max_bytes: int = 1 << 20
) -> int | None:
    """Send `raw`, read up to `max_bytes`, and close; return the status of a first HTTP
    answer."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(address, _TIMEOUT_S) as client:
        client.settimeout(1.0)
        client.sendall(raw)
        if ends:
            client.shutdown(socket.SHUT_WR)
        while len(answer) < max_bytes and (piece := client.recv(min(max_bytes, 65536))):
            answer += piece
            if b"\r\n\r\n" in answer and not ends and b"chunked" not in answer[:2000]:
                break
    words = answer[:20].split()
    is_http = len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit()
    return int(words[1]) if is_http else None
