"""The ledger of one request: where its prompt came from, what it waited for, how it went.

Made once, when a sequence ends; the log, the page and the spans are written from it. Holds
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
    """From its arrival to its admission; None if it was never admitted."""

    first_token_s: float | None
    """From its arrival to its first token."""

    inter_token_s: float | None
    """Mean time between two tokens."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    tokens_by_source: Mapping[str, int]
    """The prompt's tokens: `device`, `host`, `storage`, `peer`, `computed`."""

    miss_reason: str | None
    """Why not more of it was found; None when all that can be found was."""

    loaded_bytes: int
    """KV that was brought up from lower tiers or peers for it."""

    load: LoadUsage | None
    """Load or compute: what was chosen, at what price, and what came of it."""

    finish_reason: str
    traceparent: str | None = None
    """The caller's span, as its request named it."""

    def as_log(self) -> dict[str, Any]:
        """The fields of a line of the log: those that say something."""
        fields = asdict(self)
        return {name: value for name, value in fields.items() if value is not None}
