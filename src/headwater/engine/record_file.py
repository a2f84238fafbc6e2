"""The file of `headwater serve --record`. The supervisor creates it; all HTTP workers write to
it."""

import json
import os
import secrets
from pathlib import Path

from msgspec import Struct

from headwater.errors import ConfigError

VERSION = 1


class RecordTarget(Struct, frozen=True, kw_only=True):
    """What a worker needs to write to the file. Workers that share it write equal keys for
    equal blocks."""

    descriptor: int
    """Opened for appending. Each line is written with one call, so lines never mix."""

    secret: bytes
    """Salt of the keys. It is never written and is lost when the server ends."""

    start_s: float
    block_tokens: int


class RecordFile:
    """The open recording of a server. It owns the descriptor until `close`."""

    def __init__(self, path: Path, *, start_s: float) -> None:
        """Raises ConfigError if `path` exists or cannot be created."""
        self._path = path
        self._start_s = start_s
        self._secret = secrets.token_bytes(32)
        self._has_begun = False
        self._is_closed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self.descriptor = os.open(path, flags, 0o600)
        except FileExistsError as exc:
            raise ConfigError(
                f"--record {path} exists already and is not overwritten; choose another file"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"cannot write --record {path}: {exc.strerror}") from exc

    def begin(self, block_tokens: int) -> RecordTarget:
        """Write the first line, once, and return what workers need."""
        if not self._has_begun:
            self._has_begun = True
            header = {"headwater_recording": VERSION, "block_tokens": block_tokens}
            os.write(self.descriptor, (json.dumps(header) + "\n").encode())
        return RecordTarget(
            descriptor=self.descriptor,
            secret=self._secret,
            start_s=self._start_s,
            block_tokens=block_tokens,
        )

    def close(self) -> None:
        """Close the file and remove it if nothing was served. Calling it twice is safe."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)
            if not self._has_begun:
                self._path.unlink(missing_ok=True)
