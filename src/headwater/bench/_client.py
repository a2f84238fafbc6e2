"""A cheap client of the completions API: one process, raw HTTP, asyncio.

It shares a core with the HTTP workers. While answers arrive, it only records the time of each
read; the content is parsed when they have ended.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headwater.errors import EngineDead

_EVENT = b"data: {"
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer, with the time of each of its reads."""

    began_s: float
    reads: list[tuple[float, bytes]]

    def event_times_s(self) -> list[float]:
        """Arrival time of each token's event; the usage event is left out."""
        times, seen = [], b""
        for at_s, data in self.reads:
            joined = seen[-len(_EVENT) + 1 :] + data
            times += [at_s] * joined.count(_EVENT)
            seen = joined
        return times[:-1]

    def usage(self) -> dict[str, Any]:
        """`usage` of the last event."""
        usage: dict[str, Any] = self._events()[-1]["usage"]
        return usage

    def token_ids(self) -> list[int]:
        """The generated token ids, if the request asked for them."""
        choices = [choice for event in self._events() for choice in event["choices"]]
        return [token for choice in choices for token in choice["token_ids"]]

    def _events(self) -> list[dict[str, Any]]:
        whole = b"".join(data for _, data in self.reads)
        text = _unchunked(whole[whole.index(b"\r\n\r\n") + 4 :])
        parts = [part.removeprefix(b"data: ") for part in text.split(b"\n\n")]
        return [json.loads(part) for part in parts if part.startswith(b"{")]


class BenchConnection:
    """One kept-alive connection; one request at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host

    async def ask(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Post a streamed completion and read it to its end."""
        content = json.dumps(body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n{more}"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        began_s = time.perf_counter()
        self._writer.write(head.encode() + content)
        reads: list[tuple[float, bytes]] = []
        end = b""
        while not end.endswith(_LAST_CHUNK):
            data = await self._reader.read(_READ_BYTES)
            reads.append((time.perf_counter(), data))
            if not data or not reads[0][1].startswith(b"HTTP/1.1 200"):
                raise EngineDead(f"the server answered {b''.join(d for _, d in reads)!r}")
            end = (end + data)[-len(_LAST_CHUNK) :]
        return Answer(began_s=began_s, reads=reads)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[BenchConnection]:
    """A connection to a server on this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield BenchConnection(reader, writer, f"127.0.0.1:{port}")
    finally:
        writer.close()
        await writer.wait_closed()


def _unchunked(body: bytes) -> bytes:
    """The content of a chunked body: each chunk is preceded by a line with its length in
    hex."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
