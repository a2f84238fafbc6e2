"""Server-sent events as bytes: whole ones are passed on at once, half ones never."""

_END = b"\n\n"
_MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventSplitter:
    """Cuts a stream where events end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """All whole events that are there by now, as they came; raises ValueError for one that
        never seems to end."""
        whole = self._rest + piece
        end = whole.rfind(_END)
        cut = 0 if end < 0 else end + len(_END)
        self._rest = whole[cut:]
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise ValueError("an event is longer than any that is served")
        return whole[:cut]
