"""Responses that later ones may continue: bounded in number, bytes and time, in memory.

Nothing is written to disk. A response belongs to the tenant (`cache_salt`) that made it: to any
other it does not exist.
"""

from collections import OrderedDict
from dataclasses import dataclass

from headwater.server.responses_schema import ResponsesAnswer
from headwater.server.schema import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response, and the conversation up to its end."""

    answer: ResponsesAnswer
    messages: tuple[Message, ...]
    session_id: str
    cache_salt: str
    num_bytes: int


class ResponseStore:
    """Keeps the newest responses; one thread."""

    def __init__(self, *, max_responses: int, max_bytes: int, lifetime_s: float) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._entries: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        """By id: when its time is over, oldest first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, entry: StoredResponse, *, now: float) -> None:
        """Keep a response; the oldest ones make room. One that is too large is not kept."""
        self.remove(entry.answer.id)
        if not self.is_on or entry.num_bytes > self._max_bytes:
            return
        self._entries[entry.answer.id] = now + self._lifetime_s, entry
        self._num_bytes += entry.num_bytes
        self._expire(now)
        while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
            self._pop_oldest()

    def get(self, response_id: str, cache_salt: str, *, now: float) -> StoredResponse | None:
        """A response of this tenant whose time is not over."""
        self._expire(now)
        _, entry = self._entries.get(response_id, (0.0, None))
        if entry is None or entry.cache_salt != cache_salt:
            return None
        return entry

    def remove(self, response_id: str) -> None:
        """Forget a response; an unknown one is ignored."""
        if response_id in self._entries:
            _, entry = self._entries.pop(response_id)
            self._num_bytes -= entry.num_bytes

    def _expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._pop_oldest()

    def _pop_oldest(self) -> None:
        _, (_, entry) = self._entries.popitem(last=False)
        self._num_bytes -= entry.num_bytes
