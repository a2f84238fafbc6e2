"""The record of one request: where its prompt came from, what it waited for, how it ended.

It is made once, when a sequence ends. The log, the dashboard and the spans use it. It contains
counts and times only: no token, no text, no salt.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.scheduler.request import LoadUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One sequence from its arrival to its end."""

    request_id: str
    start_unix_s: float
    """When it arrived, in seconds since 1970."""

    duration_s: float
    queued_s: float | None
    """Seconds from its arrival to its admission; None if it was never admitted."""

    first_token_s: float | None
    """Seconds from its arrival to its first token."""

    inter_token_s: float | None
    """Mean time between two tokens."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tokens_by_source: Mapping[str, int]
    """Prompt tokens by source: `device`, `host`, `storage`, `peer`, `computed`."""

    miss_reason: str | None
    """Why not more of the prompt was found; None if everything that can be found was found."""

    loaded_bytes: int
    """Bytes of KV loaded from lower tiers or peers for it."""

    load: LoadUsage | None
    """The decision between loading and computing, its price and its result."""

    finish_reason: str
    traceparent: str | None = None
    """The caller's span, from the request."""

    def as_log(self) -> dict[str, Any]:
        """The fields of a log line; fields without a value are left out."""
        fields = asdict(self)
        return {name: value for name, value in fields.items() if value is not None}
