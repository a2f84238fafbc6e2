"""Requests for benchmarks: a trace file, or a multi-turn workload made from a seed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from headwater.errors import ConfigError
from headwater.types import Tokens

TRACE_BLOCK = 512
"""Tokens that one hash id of a trace stands for."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace: an id stands for 512 tokens *and all before them*."""

    hash_ids: list[int]
    input_length: int
    output_length: int

    def prompt(self) -> Tokens:
        """The ids expanded to tokens: the same id gives the same tokens, always."""
        ids = np.array(self.hash_ids, dtype=np.int32) * TRACE_BLOCK
        tokens = np.add.outer(ids, np.arange(TRACE_BLOCK, dtype=np.int32)).ravel()
        return tokens[: self.input_length]

    def output(self, number: int) -> Tokens:
        """Tokens that no other request generates; `number` tells requests apart."""
        start = -1 - number * TRACE_BLOCK
        return np.arange(start, start - self.output_length, -1, dtype=np.int32)


def read_trace(path: Path, limit: int) -> list[TraceRequest]:
    """The first `limit` requests of a trace in the Mooncake format."""
    try:
        with path.open() as lines:
            return [_parse(line, n) for n, line in enumerate(islice(lines, limit), start=1)]
    except OSError as exc:
        raise ConfigError(f"cannot read the trace {path}: {exc.strerror}") from exc


def make_workload(limit: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations that take turns: a few shared system prompts, prompts that grow."""
    return list(islice(_conversations(np.random.default_rng(seed)), limit))


def _parse(line: str, number: int) -> TraceRequest:
    try:
        row = json.loads(line)
        return TraceRequest(row["hash_ids"], row["input_length"], row["output_length"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"line {number} of the trace is not a request: {exc!r}") from exc


def _conversations(rng: np.random.Generator) -> Iterator[TraceRequest]:
    """Endless: 200 open conversations; each turn adds 1 to 20 ids, one in eight is the last."""
    next_id = 8
    open_ids: list[list[int]] = [[] for _ in range(200)]
    while True:
        which = int(rng.integers(len(open_ids)))
        ids = open_ids[which] or [int(rng.integers(8))]
        added = int(rng.geometric(0.15))
        ids = [*ids, *range(next_id, next_id + min(added, 20))]
        next_id += min(added, 20)
        open_ids[which] = [] if rng.random() < 0.125 or len(ids) > 200 else ids
        cut = int(rng.integers(TRACE_BLOCK))
        yield TraceRequest(ids, len(ids) * TRACE_BLOCK - cut, int(rng.geometric(1 / 300)))
