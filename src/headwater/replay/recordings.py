"""Reads the file of `headwater serve --record FILE` as the requests of a trace.

The first line identifies the file. Each other line is a request that ended, with a salted key
for each full block of its prompt and output. A key stands for its block and everything before
it, like the ids of a trace; so later prompts find generated blocks, as they did in the recorded
server.
"""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from headwater.errors import ConfigError
from headwater.replay.trace import MAX_TOKEN, TraceRequest

_MARK = "headwater_recording"
_VERSION = 1
_MAX_BLOCK = 1 << 16


def is_recording(path: Path) -> bool:
    """Whether the first line identifies a recording. False for a file that cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            return _MARK in lines.readline(1000)
    except (OSError, UnicodeDecodeError):
        return False


def read_recording(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a recording: the first `limit`, in order of arrival."""
    try:
        with path.open(encoding="utf-8") as lines:
            block_tokens = _read_header(next(lines, ""), path)
            requests = _read_lines(lines, block_tokens)
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the recording {path}: {exc}") from exc
    requests.sort(key=lambda request: request.arrival_s)
    return list(islice(requests, limit))


def _read_header(line: str, path: Path) -> int:
    try:
        header = json.loads(line)
        if header[_MARK] != _VERSION:
            raise ConfigError(
                f"the recording {path} has version {header[_MARK]!r}, but this program reads version {_VERSION}; "
                "record the traffic again"
            )
        block_tokens = header["block_tokens"]
        if type(block_tokens) is not int or not 1 <= block_tokens <= _MAX_BLOCK:
            raise ValueError(f"blocks of {block_tokens!r} tokens")
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"the first line of the recording {path} is damaged: {exc!r}"
        ) from exc
    return block_tokens


def _read_lines(lines: Iterable[str], block_tokens: int) -> list[TraceRequest]:
    ids: dict[str, int] = {}
    """A number for each key. Partial blocks have no key and get their own numbers."""
    num_ids, requests = 0, []
    for number, line in enumerate(lines, start=2):
        try:
            row = json.loads(line)
            start, end = int(row["input_length"]), int(row["output_length"])
            keys: list[str] = row["keys"]
            num_tokens = start + end
            if start < 1 or end < 0 or len(keys) != num_tokens // block_tokens:
                raise ValueError("its lengths do not fit its keys")
            path = []
            for key in keys:
                if key not in ids:
                    ids[key], num_ids = num_ids, num_ids + 1
                path.append(ids[key])
            if num_tokens % block_tokens:
                path.append(num_ids)
                num_ids += 1
            if num_ids * block_tokens > MAX_TOKEN:
                raise ValueError("more different blocks than can be numbered")
            arrival_s = float(row["timestamp"]) / 1e3
            requests.append(
                TraceRequest(path, start, end, arrival_s, block_tokens, has_output=True)
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"line {number} of the recording is damaged: {exc!r}") from exc
    return requests
