"""Stored responses that later requests may continue: in memory, bounded in number, bytes and
time.

Nothing is written to disk. A response belongs to the tenant (`cache_salt`) that created it;
other tenants cannot find it. The store keeps encoded responses, because it may be in another
process than the HTTP worker that made them.
"""

from collections import OrderedDict

import msgspec
from msgspec import Struct

from headwater.server.schema import Message


class StoredResponse(Struct, frozen=True, kw_only=True):
    """A response, and the conversation up to its end."""

    answer: bytes
    """The body of the response, as JSON."""

    messages: tuple[Message, ...]
    session_id: str

    def encode(self) -> bytes:
        """The encoded form that the store keeps."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> "StoredResponse":
        """The response from its encoded form."""
        return msgspec.msgpack.decode(data, type=StoredResponse)


class ResponseStore:
    """Keeps the newest responses. Used by one thread."""

    def __init__(self, *, max_responses: int, max_bytes: int, lifetime_s: float) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._entries: OrderedDict[str, tuple[float, str, bytes]] = OrderedDict()
        """Expiry time, tenant and bytes of each response, by id; oldest first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response_id: str, cache_salt: str, data: bytes, *, now: float) -> None:
        """Keep a response; the oldest ones are dropped for it. A response that is too large is
        not kept."""
        self.remove(response_id)
        if not self._max_responses or len(data) > self._max_bytes:
            return
        self._entries[response_id] = now + self._lifetime_s, cache_salt, data
        self._num_bytes += len(data)
        self._expire(now)
        while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
            self._pop_oldest()

    def get(self, response_id: str, cache_salt: str, *, now: float) -> bytes | None:
        """A response of this tenant that has not expired."""
        self._expire(now)
        entry = self._entries.get(response_id)
        if entry is None or entry[1] != cache_salt:
            return None
        return entry[2]

    def remove(self, response_id: str) -> None:
        """Forget a response; an unknown one is ignored."""
        if response_id in self._entries:
            self._num_bytes -= len(self._entries.pop(response_id)[2])

    def _expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._pop_oldest()

    def _pop_oldest(self) -> None:
        _, (_, _, data) = self._entries.popitem(last=False)
        self._num_bytes -= len(data)
