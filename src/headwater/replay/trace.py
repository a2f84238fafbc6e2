"""Traces of requests in the Mooncake format, and the prompts that they describe."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from headwater.cache import Hint
from headwater.errors import ConfigError
from headwater.types import Tokens

TRACE_BLOCK = 512
"""Tokens of one hash id in the Mooncake format."""

MAX_TOKEN = 1 << 31
"""Token ids are made from hash ids and are below this."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. An id stands for a block *and everything before it*."""

    hash_ids: list[int]
    input_length: int
    output_length: int
    arrival_s: float = 0.0
    block_tokens: int = TRACE_BLOCK
    has_output: bool = False
    """Whether the ids include the output, which is then known."""

    session: str = ""
    hint: Hint | None = None
    """The session of the request, and its client's hint; see `replay.hints`."""

    def prompt(self) -> Tokens:
        """The ids expanded to tokens: equal ids always give equal tokens."""
        return self.whole_blocks()[: self.input_length]

    def whole_blocks(self) -> Tokens:
        """The tokens of all ids, with the last block filled up to its full size."""
        ids = np.array(self.hash_ids, dtype=np.int32) * self.block_tokens
        return np.add.outer(ids, np.arange(self.block_tokens, dtype=np.int32)).ravel()

    def known_output(self) -> Tokens | None:
        """The output, if the trace contains it."""
        if not self.has_output:
            return None
        return self.whole_blocks()[self.input_length : self.input_length + self.output_length]

    def output(self, number: int) -> Tokens:
        """Tokens that no other request generates; `number` identifies the request."""
        start = -1 - number * TRACE_BLOCK
        return np.arange(start, start - self.output_length, -1, dtype=np.int32)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace in the Mooncake format, in file order."""
    try:
        with path.open() as lines:
            return [_parse(line, n) for n, line in enumerate(islice(lines, limit), start=1)]
    except OSError as exc:
        raise ConfigError(f"cannot read the trace {path}: {exc.strerror}") from exc


def _parse(line: str, number: int) -> TraceRequest:
    try:
        row = json.loads(line)
        ids, arrival_s = row["hash_ids"], float(row.get("timestamp", 0)) / 1e3
        request = TraceRequest(ids, row["input_length"], row["output_length"], arrival_s)
        if not all(type(i) is int and 0 <= i < 1 << 22 for i in ids):
            raise ValueError("a hash id is not a number below 4194304")
        if not 0 <= request.input_length <= len(ids) * TRACE_BLOCK or request.output_length < 0:
            raise ValueError(
                f"input_length {request.input_length} must be 0 to {len(ids) * TRACE_BLOCK} for "
                f"{len(ids)} hash_ids, and output_length {request.output_length} not negative"
            )
        return request
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"line {number} of the trace is not a request: {exc!r}") from exc
