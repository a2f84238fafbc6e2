"""Which requests are alive, by the name their client knows; the server's own queue limit."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.errors import QueueFull, RequestError
from headwater.metrics import names
from headwater.metrics.recorder import Recorder
from headwater.types import RequestId


class LiveRequests:
    """Names to the sequences that run for them.

    A client may use one name twice; the engine never sees a name twice.
    """

    def __init__(self, max_sequences: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._max_sequences = max_sequences
        self._sequences: dict[str, list[RequestId]] = {}
        self.num_sequences = 0

    @contextmanager
    def enter(self, name: str, num_sequences: int) -> Iterator[list[RequestId]]:
        """Ids for the sequences of one request, alive until the block is left.

        Raises QueueFull where they are more than may wait now, RequestError where they are
        more than ever may; nothing is changed then.
        """
        if num_sequences > self._max_sequences:
            raise RequestError(
                f"{num_sequences} sequences in one request are more than the "
                f"{self._max_sequences} that this server takes at once"
            )
        if self.num_sequences + num_sequences > self._max_sequences:
            self._recorder.count(names.REFUSED)
            raise QueueFull(
                f"{self.num_sequences} sequences are running or waiting, and at most "
                f"{self._max_sequences} may; try again later"
            )
        stem = f"{name}-{secrets.token_hex(6)}"
        ids = [RequestId(f"{stem}-{place}") for place in range(num_sequences)]
        self.num_sequences += num_sequences
        self._sequences.setdefault(name, []).extend(ids)
        try:
            yield ids
        finally:
            self.num_sequences -= num_sequences
            left = [entry for entry in self._sequences[name] if not entry.startswith(stem)]
            if left:
                self._sequences[name] = left
            else:
                del self._sequences[name]

    def sequences_of(self, name: str) -> list[RequestId]:
        """Engine ids that run under this name now."""
        return list(self._sequences.get(name, ()))
